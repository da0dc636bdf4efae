"""Predicts when a request would have its first token: plain arithmetic on what workers say of their pace and their queues.

It follows the scheduler (docs/scheduling.md): whoever is of an earlier class, or of the same and came before, comes first; decodes
take their part of each step, and in a class the fast lane its own. Turns between tenants, turns by age and what is moved between workers are left out.
"""

from dataclasses import dataclass

from paceline.core.pace import PendingTokens
from paceline.core.request import Priority
from router.views import Ask, QueueFacts, WorkerView

# On average half of the step under way, or of the turn, is still to come.
_LEFT = 0.5
# Something is always left for the others.
_MOST_URGENT = 0.9


@dataclass(frozen=True, slots=True)
class Forecast:
    """In seconds. `end_s` is when the shortest output that it may have would be complete; `alone_` is what would be if nobody else were there."""

    ttft_s: float
    end_s: float
    alone_ttft_s: float
    alone_end_s: float
    # Time comes in pieces of a step, or of a turn: what is predicted for later may come so much after it.
    grain_s: float

    @property
    def wait_s(self) -> float:
        """What the others add before its first token."""
        return self.ttft_s - self.alone_ttft_s


def forecast(ask: Ask, num_tokens: int, worker: WorkerView, num_after: int = 0) -> Forecast | None:
    """For a request of which this worker has to compute `num_tokens`, and after the first token `num_after` more.

    None if it has not said enough of itself.
    """
    facts = worker.queue
    if facts is None:
        return None
    pace, queued = facts.pace, pending(worker, facts)
    step_s = _step_s(worker, facts, queued)
    alone_s = pace.compute_s(num_tokens, 0, facts.max_step_tokens)
    alone_end_s = alone_s + num_after * (pace.step_s + pace.decode_s)
    num_until = _tokens_until(ask, num_tokens, facts, queued)
    # What is before it is in the step under way, as far as it fits there.
    num_under_way = min(num_until - num_tokens, max(0, facts.max_step_tokens - worker.num_running))
    by_tokens_s = _LEFT * step_s + _compute_s(worker, facts, num_until - num_under_way)
    turns = num_turns(ask, worker, facts)
    by_turns_s = (turns - _LEFT) * pace.turn_s + _compute_s(worker, facts, num_tokens) if turns else 0.0
    # Whoever is more urgent and comes meanwhile comes first too.
    ttft_s = max(alone_s, max(by_tokens_s, by_turns_s) / (1 - _share_of_urgent(ask, worker, facts)))
    end_s = max(alone_end_s, ttft_s + _generate_s(num_after, worker, facts, queued)) if num_after else ttft_s
    return Forecast(ttft_s, end_s, alone_s, alone_end_s, max(step_s, pace.turn_s if turns else 0.0))


def _generate_s(num_steps: int, worker: WorkerView, facts: QueueFacts, queued: PendingTokens) -> float:
    """So many steps, with prompts in them: all that wait now and those that come meanwhile, but no more than fit."""
    # Those that wait now will decode beside it.
    pace, num_decodes = facts.pace, min(facts.max_seats, worker.num_sequences + 1)
    decode_s = num_steps * (pace.step_s + pace.decode_s * num_decodes)
    prompts_s = pace.prompt_token_s * (sum(queued.fast) + sum(queued.normal))
    coming = min(_MOST_URGENT, pace.prompt_token_s * sum(pace.tokens_per_s))
    full_s = decode_s + num_steps * pace.prompt_token_s * max(0, facts.max_step_tokens - num_decodes)
    return min(full_s, (decode_s + prompts_s) / (1 - coming))


def _share_of_urgent(ask: Ask, worker: WorkerView, facts: QueueFacts) -> float:
    """Of the time, as far as the classes before it have come of late."""
    if ask.priority is Priority.REALTIME:
        return 0.0
    per_s = int(sum(facts.pace.tokens_per_s[: ask.priority]))
    return min(_MOST_URGENT, _compute_s(worker, facts, per_s))


def num_turns(ask: Ask, worker: WorkerView, facts: QueueFacts) -> int:
    """Newcomers that come in until it has, its own turn included, where there is no seat or no room; 0 where there is."""
    if not (facts.is_blocked or worker.num_sequences + ask.num_candidates > facts.max_seats):
        return 0
    unseen = max(0, worker.num_assigned_sequences - worker.num_running - worker.num_waiting)
    return sum(facts.waiting[: ask.priority + 1]) + unseen + 1


def pending(worker: WorkerView, facts: QueueFacts) -> PendingTokens:
    """The higher of what is reported and of what this router has sent."""
    reported, sent = facts.pending, worker.assigned
    (r0, r1, r2), (s0, s1, s2) = reported.fast, sent.fast
    fast = max(r0, s0), max(r1, s1), max(r2, s2)
    (r0, r1, r2), (s0, s1, s2) = reported.normal, sent.normal
    return PendingTokens(fast, (max(r0, s0), max(r1, s1), max(r2, s2)))


def _tokens_until(ask: Ask, num_tokens: int, facts: QueueFacts, queued: PendingTokens) -> int:
    """What is computed until this request's own tokens are: the classes before its own, and of that its lane, and the other one meanwhile."""
    share, priority = facts.fast_lane.share, ask.priority
    earlier = sum(queued.fast[:priority]) + sum(queued.normal[:priority])
    fast, normal = queued.fast[priority], queued.normal[priority]
    if ask.is_fast_in(facts.fast_lane):
        own = fast + num_tokens
        return earlier + own + int(min(normal, own * (1 - share) / share))
    own = normal + num_tokens
    return earlier + own + int(min(fast, own * share / (1 - share)))


def _compute_s(worker: WorkerView, facts: QueueFacts, num_tokens: int) -> float:
    return facts.pace.compute_s(num_tokens, worker.num_running, facts.max_step_tokens)


def current_step_s(worker: WorkerView, facts: QueueFacts) -> float:
    """A step as it is now; 0 where there is nothing to do."""
    return _step_s(worker, facts, pending(worker, facts))


def _step_s(worker: WorkerView, facts: QueueFacts, queued: PendingTokens) -> float:
    num_tokens = sum(queued.fast) + sum(queued.normal)
    if not (num_tokens or worker.num_running):
        return 0.0
    pace, room = facts.pace, max(0, facts.max_step_tokens - worker.num_running)
    return pace.step_s + pace.decode_s * worker.num_running + pace.prompt_token_s * min(num_tokens, room)
