"""How fast a worker is, as messages and as values. What another process says is not trusted to be a number that makes sense."""

from paceline.core.pace import ByClass, FastLane, Pace, PendingTokens
from paceline.v1 import worker_pb2

# More seconds for a step, and more tokens in a second, than any worker has.
_MOST = 1e9


def pace_to_proto(pace: Pace) -> worker_pb2.Pace:
    """For a load report."""
    return worker_pb2.Pace(
        step_s=pace.step_s,
        decode_s=pace.decode_s,
        prompt_token_s=pace.prompt_token_s,
        turn_s=pace.turn_s,
        realtime_tokens_per_s=pace.tokens_per_s[0],
        standard_tokens_per_s=pace.tokens_per_s[1],
        batch_tokens_per_s=pace.tokens_per_s[2],
    )


def pending_to_proto(tokens: ByClass) -> worker_pb2.PendingTokens:
    """For a load report."""
    realtime, standard, batch = tokens
    return worker_pb2.PendingTokens(realtime=realtime, standard=standard, batch=batch)


def pace_of(load: worker_pb2.WatchLoadResponse) -> Pace | None:
    """None where the worker has measured nothing, or nothing that could be."""
    said = load.pace
    times = (said.step_s, said.decode_s, said.prompt_token_s, said.turn_s)
    rates = (said.realtime_tokens_per_s, said.standard_tokens_per_s, said.batch_tokens_per_s)
    # Written so that NaN is none either.
    is_known = load.HasField("pace") and all(0 <= number < _MOST for number in (*times, *rates))
    return Pace(*times, rates) if is_known and said.step_s + said.prompt_token_s > 0 else None


def pending_of(load: worker_pb2.WatchLoadResponse) -> PendingTokens:
    """What is still to be computed there."""
    return PendingTokens(_by_class(load.pending_fast), _by_class(load.pending_normal))


def fast_lane_of(info: worker_pb2.GetInfoResponse) -> FastLane:
    """Whom the worker has a lane for."""
    share = info.fast_lane_share if 0 <= info.fast_lane_share < 1 else 0.0
    return FastLane(share, info.fast_lane_prompt_tokens, info.fast_lane_output_tokens)


def _by_class(said: worker_pb2.PendingTokens) -> ByClass:
    return said.realtime, said.standard, said.batch
