"""What is simulated: the shape of a cluster and its settings, checked."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import KVGroup
from paceline.engine.policies import TURN_POLICIES, VICTIM_POLICIES
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.launcher.config import Topology
from paceline.runtime.config import require_finite
from paceline.worker.config import WorkerConfig
from router.config import RouterConfig
from router.costs import RouteCosts
from router.in_time import Bounds
from router.placement import DisaggregateMode, Rules
from router.policies import PlacementPolicy

_ONE_WORKER = Topology(0, 1)


def defaults_of(config: type[Any]) -> dict[str, Any]:
    """The settings of a service that have a default, by name."""
    return {each.name: each.default for each in fields(config)}


_BATCHING = ("continuous", "static")
# What a worker does not let anybody set, and the least that makes sense.
_LEAST = {
    "cool_down_after": 1,
    "cool_down_window": 1,
    "cool_down_steps": 1,
    "static_batch_size": 1,
    "num_swap_blocks": 0,
    "watermark_rise": 0,
}
_MOST = 1_000_000_000
# A pool's books are lists in memory; ten times as many blocks as machines have today.
_MAX_BLOCKS = 1 << 22
_WORKER, _ROUTER = defaults_of(WorkerConfig), defaults_of(RouterConfig)


def scheduler_config(**settings: Any) -> SchedulerConfig:
    """A worker's scheduler, with the defaults that a worker has; raises ConfigError for a setting that there is not."""
    known = {each.name for each in fields(SchedulerConfig)}
    for name in settings:
        if name not in known:
            raise ConfigError(f"the scheduler has no setting {name!r}; it has {', '.join(sorted(known))}")
    shared = {name: value for name, value in _WORKER.items() if name in known}
    # What a worker would refuse is refused here too.
    require_finite(settings)
    WorkerConfig(model="simulated", **{name: value for name, value in settings.items() if name in _WORKER})
    for name, choices in (("policy", TURN_POLICIES), ("victim", VICTIM_POLICIES), ("batching", _BATCHING)):
        if settings.get(name, next(iter(choices))) not in choices:
            raise ConfigError(f"{name} = {settings[name]!r} is none of {', '.join(choices)}")
    for name, value in settings.items():
        if type(value) is int and value > _MOST:
            raise ConfigError(f"{name} must be at most {_MOST:,}")
    for name, least in _LEAST.items():
        if settings.get(name, least) < least:
            raise ConfigError(f"{name} must be at least {least}, not {settings[name]}")
    # Blocks that lie in another worker's cache are computed: nobody pulls them here.
    return SchedulerConfig(**{**shared, "prefix_pull": "never", **settings})


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """An xPyD cluster of equal workers in each tier. The defaults are those of the services."""

    topology: Topology = _ONE_WORKER
    prefill: SchedulerConfig = field(default_factory=scheduler_config)
    decode: SchedulerConfig = field(default_factory=scheduler_config)
    block_size: int = _WORKER["block_size"]
    # Of each worker.
    num_kv_tokens: int = 46_592
    groups: tuple[KVGroup, ...] = (KVGroup(),)
    disaggregate: DisaggregateMode = _ROUTER["disaggregate"]
    placement: PlacementPolicy = _ROUTER["placement"]
    handover_tokens: int = _ROUTER["handover_tokens"]
    # Within what requests are served, or refused; by default nothing is.
    bounds: Bounds = field(default_factory=Bounds)
    # Requests under way at once; None: no bound.
    max_requests: int | None = None

    def __post_init__(self) -> None:
        """Refuses what is no cluster."""
        if self.block_size < 1 or self.num_blocks < 2:
            raise ConfigError(f"{self.num_kv_tokens} tokens of KV in blocks of {self.block_size} are too few")
        if self.num_blocks > _MAX_BLOCKS:
            raise ConfigError(f"{self.num_blocks:,} KV blocks a worker are too many: at most {_MAX_BLOCKS:,}")
        if self.max_requests is not None and self.max_requests < 1:
            raise ConfigError(f"--max-requests is {self.max_requests}: at least 1, or 0 for no bound")
        if self.prefill.prefix_pull != "never" or self.decode.prefix_pull != "never":
            raise ConfigError("prefix_pull: pulls of cached prefixes are not simulated; leave it out")
        if self.disaggregate == "always" and not self.topology.num_prefill:
            raise ConfigError(
                f"--disaggregate always needs a prefill worker, and the topology is {self.topology}"
            )

    @property
    def rules(self) -> Rules:
        """Those of the router; what could be pulled is computed, since pulls are not simulated."""
        costs = RouteCosts(self.handover_tokens)
        return Rules(self.disaggregate, self.placement, replace(costs, pulls=False))

    @property
    def num_blocks(self) -> int:
        """Blocks of each worker."""
        return self.num_kv_tokens // self.block_size

    def with_scheduler(self, **settings: Any) -> "ClusterSpec":
        """The same cluster, with these settings in both tiers."""
        scheduler_config(**settings)
        return replace(
            self, prefill=replace(self.prefill, **settings), decode=replace(self.decode, **settings)
        )

    def as_json(self) -> dict[str, Any]:
        """What a plan is about: the shape, and the settings as they stand in a config file."""
        return {
            "topology": str(self.topology),
            "block_size": self.block_size,
            "max_num_batched_tokens": self.decode.max_num_batched_tokens,
            "watermark": self.decode.watermark,
        }
