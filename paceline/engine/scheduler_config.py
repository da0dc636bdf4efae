"""How a scheduler decides. The names are those of a worker's settings; every default works on a laptop."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The bounds of a step, what the model says about its tokens, and the policies."""

    max_num_batched_tokens: int
    max_num_seqs: int
    eos_token_ids: frozenset[int] = frozenset()
    fingerprint: bytes = b""
    # A key of TURN_POLICIES, and one of VICTIM_POLICIES.
    policy: str = "fcfs"
    victim: str = "cost"
    # "continuous", or "static": nobody is admitted before everybody is done. A baseline for comparison.
    batching: str = "continuous"
    # Share of the blocks that admission leaves free for growth, and by how much preemptions may raise it.
    watermark: float = 0.2
    watermark_rise: float = 0.05
    # Short requests have so large a part of each step to themselves; 0: none.
    fast_lane_share: float = 0.3
    fast_lane_prompt_tokens: int = 128
    fast_lane_output_tokens: int = 128
    # Seconds of waiting after which a request has its turn by age, one in eight admissions.
    aging_s: float = 30.0
    # How many admissions may pass by a request that does not fit.
    max_overtakes: int = 64
    # BATCH requests give way once urgent ones wait so long, and run so many at a time meanwhile; see overload.py.
    overload_wait_s: float = 5.0
    static_batch_size: int = 4
    # So many preempting steps among so many begin a pause of so many.
    cool_down_after: int = 3
    cool_down_window: int = 8
    cool_down_steps: int = 16
    # At most so many decodes a step, though there are more: all of them take turns. 0: the budget is the only bound.
    max_decodes: int = 0
    # With max_decodes: those that the same experts compute decode together.
    group_by_experts: bool = False
    # Blocks in host memory for preempted sequences.
    num_swap_blocks: int = 0
    # Whether blocks that another worker has cached are pulled instead of computed: "auto" when that is cheaper, "always", or
    # "never". Somebody must answer each Recall with resume().
    prefix_pull: str = "never"
