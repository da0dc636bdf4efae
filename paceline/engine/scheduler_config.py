"""How a scheduler decides; every default works on a laptop."""

from dataclasses import dataclass, field

from paceline.engine.pressure import PressureConfig


@dataclass(frozen=True, slots=True)
class FastLane:
    """Short requests that have a part of each step to themselves."""

    share: float = 0.3  # of max_num_batched_tokens; 0: there is no fast lane
    max_prompt_tokens: int = 128
    max_output_tokens: int = 128


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
    fast_lane: FastLane = field(default_factory=FastLane)
    pressure: PressureConfig = field(default_factory=PressureConfig)
    # Seconds after which a waiting request moves up a class.
    aging_s: float = 30.0
    # How many admissions may pass by a request that does not fit.
    max_overtakes: int = 64
    # BATCH requests give way once urgent ones wait so long; see overload.py.
    overload_wait_s: float = 5.0
    # BATCH sequences at a time while they give way.
    static_batch_size: int = 4
    # Blocks in host memory for preempted sequences.
    num_swap_blocks: int = 0
    # Whether somebody answers each Recall with resume(): then a preempted sequence may be pulled again from where it came.
    may_recall: bool = False
