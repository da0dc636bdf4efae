from paceline.v1 import engine_pb2 as _engine_pb2
from paceline.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("worker_id", "role", "boot_epoch", "fingerprint", "model_id", "max_model_tokens", "vocab_size", "num_blocks", "block_bytes", "num_kv_tokens", "num_2k_requests", "own_max_model_tokens", "max_num_batched_tokens", "fast_lane_share", "fast_lane_prompt_tokens", "fast_lane_output_tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_2K_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OWN_MAX_MODEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAST_LANE_SHARE_FIELD_NUMBER: _ClassVar[int]
    FAST_LANE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAST_LANE_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _inference_pb2.WorkerRole
    boot_epoch: int
    fingerprint: _engine_pb2.ModelFingerprint
    model_id: str
    max_model_tokens: int
    vocab_size: int
    num_blocks: int
    block_bytes: int
    num_kv_tokens: int
    num_2k_requests: int
    own_max_model_tokens: int
    max_num_batched_tokens: int
    fast_lane_share: float
    fast_lane_prompt_tokens: int
    fast_lane_output_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_inference_pb2.WorkerRole, str]] = ..., boot_epoch: _Optional[int] = ..., fingerprint: _Optional[_Union[_engine_pb2.ModelFingerprint, _Mapping]] = ..., model_id: _Optional[str] = ..., max_model_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_kv_tokens: _Optional[int] = ..., num_2k_requests: _Optional[int] = ..., own_max_model_tokens: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., fast_lane_share: _Optional[float] = ..., fast_lane_prompt_tokens: _Optional[int] = ..., fast_lane_output_tokens: _Optional[int] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchLoadResponse(_message.Message):
    __slots__ = ("num_free_blocks", "num_running", "num_waiting", "num_pending_tokens", "num_steps", "num_blocks_pulled", "draining", "num_preemptions", "num_leases", "max_steps_to_release", "cooling_down", "num_waiting_realtime", "num_waiting_standard", "num_waiting_batch", "pace", "pending_fast", "pending_normal", "max_seats", "is_blocked")
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_PULLED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_TO_RELEASE_FIELD_NUMBER: _ClassVar[int]
    COOLING_DOWN_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_REALTIME_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_STANDARD_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_BATCH_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    PENDING_FAST_FIELD_NUMBER: _ClassVar[int]
    PENDING_NORMAL_FIELD_NUMBER: _ClassVar[int]
    MAX_SEATS_FIELD_NUMBER: _ClassVar[int]
    IS_BLOCKED_FIELD_NUMBER: _ClassVar[int]
    num_free_blocks: int
    num_running: int
    num_waiting: int
    num_pending_tokens: int
    num_steps: int
    num_blocks_pulled: int
    draining: bool
    num_preemptions: int
    num_leases: int
    max_steps_to_release: int
    cooling_down: bool
    num_waiting_realtime: int
    num_waiting_standard: int
    num_waiting_batch: int
    pace: Pace
    pending_fast: PendingTokens
    pending_normal: PendingTokens
    max_seats: int
    is_blocked: bool
    def __init__(self, num_free_blocks: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_pending_tokens: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_blocks_pulled: _Optional[int] = ..., draining: _Optional[bool] = ..., num_preemptions: _Optional[int] = ..., num_leases: _Optional[int] = ..., max_steps_to_release: _Optional[int] = ..., cooling_down: _Optional[bool] = ..., num_waiting_realtime: _Optional[int] = ..., num_waiting_standard: _Optional[int] = ..., num_waiting_batch: _Optional[int] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ..., pending_fast: _Optional[_Union[PendingTokens, _Mapping]] = ..., pending_normal: _Optional[_Union[PendingTokens, _Mapping]] = ..., max_seats: _Optional[int] = ..., is_blocked: _Optional[bool] = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("step_s", "decode_s", "prompt_token_s", "turn_s", "realtime_tokens_per_s", "standard_tokens_per_s", "batch_tokens_per_s")
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    TURN_S_FIELD_NUMBER: _ClassVar[int]
    REALTIME_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STANDARD_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    step_s: float
    decode_s: float
    prompt_token_s: float
    turn_s: float
    realtime_tokens_per_s: float
    standard_tokens_per_s: float
    batch_tokens_per_s: float
    def __init__(self, step_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., prompt_token_s: _Optional[float] = ..., turn_s: _Optional[float] = ..., realtime_tokens_per_s: _Optional[float] = ..., standard_tokens_per_s: _Optional[float] = ..., batch_tokens_per_s: _Optional[float] = ...) -> None: ...

class PendingTokens(_message.Message):
    __slots__ = ("realtime", "standard", "batch")
    REALTIME_FIELD_NUMBER: _ClassVar[int]
    STANDARD_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    realtime: int
    standard: int
    batch: int
    def __init__(self, realtime: _Optional[int] = ..., standard: _Optional[int] = ..., batch: _Optional[int] = ...) -> None: ...

class GetExpertLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetExpertLoadResponse(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[ExpertLoad]
    def __init__(self, layers: _Optional[_Iterable[_Union[ExpertLoad, _Mapping]]] = ...) -> None: ...

class ExpertLoad(_message.Message):
    __slots__ = ("layer", "num_tokens", "imbalance")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    layer: int
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    imbalance: float
    def __init__(self, layer: _Optional[int] = ..., num_tokens: _Optional[_Iterable[int]] = ..., imbalance: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
