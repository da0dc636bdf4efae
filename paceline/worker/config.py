"""The settings that prefill and decode workers share."""

from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import KV_TYPES
from paceline.engine.policies import TURN_POLICIES, VICTIM_POLICIES
from paceline.prefix_index.redis_url import parse_redis_url
from paceline.runtime.addresses import require_reachable
from paceline.runtime.cluster_settings import ClusterSettings, check_cluster
from paceline.runtime.config import option
from paceline.runtime.metrics_server import check_metrics_port
from paceline.runtime.serving import QUANTIZATIONS, check_serving


@dataclass(frozen=True, slots=True)
class WorkerConfig(ClusterSettings):
    """One worker. A setting's name is its flag and its key in the config file."""

    listen: str = option("127.0.0.1:0", "address to serve on: host:port, or unix:/path")
    advertise: str = option("", "address at which others reach this worker; empty: the listen address")
    worker_id: str = option(
        "", "name of this worker, unique in the cluster; empty: made from the names of host and process"
    )
    model: str = option("", "directory of the model, in Hugging Face form")
    device: str = option(
        "auto",
        "what computes: cpu, cuda:N, or cuda for the GPU whose turn it is; auto: cuda where there is one",
    )
    gpu_turn: str = option(
        "",
        "of the workers on this machine that take its GPUs in turns, this one's number and how many they are: 0/2; empty: alone",
    )
    gpu_memory_share: float = option(
        0.9,
        "part of a GPU's memory that its workers take together; what weights and steps leave of it is for KV",
    )
    max_batch_to_capture: int = option(
        64, "on a GPU: largest batch of decodes that is captured as a graph and padded to; 0: none is"
    )
    dtype: str = option(
        "auto",
        "type of the weights; auto: bfloat16 where the processor multiplies it fast, else float32",
        choices=("auto", "float32", "bfloat16"),
    )
    kv_dtype: str = option(
        "auto", "type of the KV cache; auto: that of the weights", choices=("auto", *KV_TYPES)
    )
    mla: str = option(
        "expanded",
        "what MLA models keep: expanded keys and values, or the latent that they are made from",
        choices=("expanded", "latent"),
    )
    quantization: str = option("none", "the bits of weights and activations", choices=QUANTIZATIONS)
    exactness: str = option(
        "fast",
        "exact: the same request gives the same bits on every path",
        choices=("fast", "exact"),
    )
    attention: str = option(
        "auto",
        "what attention of fast mode is computed with: native, compiled on this machine; triton, on a GPU; torch; auto, what is made for the device",
        choices=("auto", "native", "triton", "torch"),
    )
    runner: str = option(
        "torch", "what computes: torch, or a fake without a model", choices=("torch", "fake")
    )
    fake_step_ms: float = option(0.0, "with --runner fake: milliseconds a step takes")
    redis: str = option("", "the prefix table, redis://... or another form of URL; empty: none")
    register: bool = option(
        default=False, text="say in --redis where this worker is, for routers that look there"
    )
    tp: int = option(1, "processes that compute the model together, each a part of its heads")
    pp: int = option(1, "processes that compute the model together, each some of its layers")
    threads: int = option(0, "compute threads of all processes together; 0: torch's own choice")
    cores_file: str = option(
        "",
        "file by which workers of a machine lend each other cores that nobody computes on; empty: none are lent",
    )
    first_core: int = option(0, "with --cores-file: the first of this worker's --threads cores in it")
    max_model_len: int = option(0, "longest prompt and output together, in tokens; 0: the model's own limit")
    kv_memory: str = option(
        "1GiB",
        "on a CPU, memory for the KV cache: 4GiB, 512MiB, or 40% of what is free; a GPU's is by --gpu-memory-share",
    )
    num_blocks: int = option(0, "blocks of the KV cache, instead of --kv-memory; 0: not set")
    block_size: int = option(16, "tokens a KV block holds")
    pinned_prefixes: str = option(
        "", 'prefixes to keep in the cache: a JSON Lines file, {"token_ids": [..]} a line; empty: none'
    )
    max_num_batched_tokens: int = option(512, "most tokens computed in one step")
    max_num_seqs: int = option(64, "most sequences in one step")
    policy: str = option(
        "fcfs",
        "whose turn it is in a class: first come, first served; shortest job first; earliest deadline first",
        choices=tuple(TURN_POLICIES),
    )
    victim: str = option(
        "cost",
        "who loses its blocks: least work lost a block, the last to come, or who has most blocks",
        choices=tuple(VICTIM_POLICIES),
    )
    batching: str = option(
        "continuous",
        "static: nobody comes in before everybody is done; a baseline",
        choices=("continuous", "static"),
    )
    watermark: float = option(
        0.2, "share of the blocks that admission leaves free for growth; preemptions raise it by up to 0.05"
    )
    fast_lane_share: float = option(0.3, "part of each step that short requests have to themselves; 0: none")
    fast_lane_prompt_tokens: int = option(128, "longest prompt of a short request")
    fast_lane_output_tokens: int = option(128, "largest max_tokens of a short request")
    aging_s: float = option(
        30.0, "seconds of waiting after which a request has its turn by age, one in eight admissions"
    )
    max_overtakes: int = option(64, "how many may pass by a request that does not fit")
    overload_wait_s: float = option(
        5.0, "BATCH requests give way once others wait so long, and are refused at four times as much"
    )
    max_decodes: int = option(0, "most decodes in a step, which then take turns; 0: as many as there are")
    group_by_experts: bool = option(
        False,  # noqa: FBT003 - a default, beside its help
        "with --max-decodes and a mixture of experts: those that share experts decode together",
    )
    swap_memory: str = option(
        "", "host memory for the KV of preempted sequences, such as 1GiB; empty: they are computed again"
    )
    prefix_pull: str = option(
        "auto",
        "pull KV blocks that another worker has cached, instead of computing them: when it is cheaper, always, or never",
        choices=("auto", "always", "never"),
    )
    metrics_port: int = option(
        0, "port of the metrics, on the host of --listen or on loopback; 0: any that is free, -1: none"
    )
    kv_transport: str = option(
        "auto",
        "how blocks come and go: shared memory, NIXL, gRPC; auto: the first of these that works with the other worker",
        choices=("auto", "grpc", "shm", "nixl"),
    )
    lease_ttl_s: float = option(30.0, "seconds a computed prompt waits to be fetched")
    stall_s: float = option(
        120.0, "seconds without progress, though there is work, after which the worker ends as failed"
    )
    grace_s: float = option(30.0, "seconds that requests under way get to finish after SIGTERM")
    log_level: str = option(
        "info", "least level that is logged", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        """Refuses what cannot work."""
        for name in ("block_size", "max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.num_blocks < 0:
            raise ConfigError(f"--num-blocks {self.num_blocks} is negative; 0: not set")
        check_serving(self)
        check_cluster(self, listen=self.listen)
        if self.redis:
            parse_redis_url(self.redis)
        self._check_registration()
        check_metrics_port(self.metrics_port)
        if not self.model:
            raise ConfigError("--model is missing: name the directory of a model")
        self._check_scheduling()
        self._check_cores()
        self._check_gpu()

    def _check_gpu(self) -> None:
        if not 0 < self.gpu_memory_share <= 1:
            raise ConfigError(
                f"--gpu-memory-share is more than 0 and at most 1, not {self.gpu_memory_share:g}"
            )
        if self.max_batch_to_capture < 0:
            raise ConfigError(
                f"--max-batch-to-capture {self.max_batch_to_capture} is negative; 0: none is captured"
            )

    def _check_cores(self) -> None:
        if not self.cores_file:
            return
        if self.threads < 1 or self.first_core < 0:
            raise ConfigError(
                "--cores-file needs --threads, the number of this worker's own cores, and --first-core"
            )
        if self.exactness == "exact":
            raise ConfigError("--cores-file is for fast mode: exact mode keeps to one number of threads")

    def _check_registration(self) -> None:
        if self.register and not self.redis:
            raise ConfigError("--register needs --redis: name the Redis where routers look")
        if self.register:
            require_reachable(self.advertise or self.listen, "--register tells routers an address")

    def _check_scheduling(self) -> None:
        for name in ("watermark", "fast_lane_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is a share from 0 to less than 1, not {getattr(self, name)}"
                )
        for name in ("aging_s", "overload_wait_s", "stall_s"):
            if getattr(self, name) < 0.001:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be at least a millisecond, not {getattr(self, name)}"
                )
        if self.fake_step_ms < 0:
            raise ConfigError(f"--fake-step-ms {self.fake_step_ms} is negative")
        if self.group_by_experts and not self.max_decodes:
            raise ConfigError(
                "--group-by-experts needs --max-decodes: when all decode in each step there are no groups"
            )
        if self.max_decodes < 0:
            raise ConfigError(f"--max-decodes {self.max_decodes} is negative; 0: as many as there are")
        if self.max_overtakes < 0:
            raise ConfigError(f"--max-overtakes {self.max_overtakes} is negative; 0: nobody may pass")
