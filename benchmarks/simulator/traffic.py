"""Traces that are made up, by name and seed: for a first look, for tests, and where no log of real traffic is at hand."""

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.simulator.trace import MAX_ARRIVAL_S, PrefixPart, Trace, TraceRequest
from paceline.core.errors import ConfigError

# Of requests, of tokens, of anything: all of it is made up before the first request arrives.
_MOST = 10_000_000


@dataclass(frozen=True, slots=True)
class Traffic:
    """What can be said of made-up traffic, as in `poisson:requests=500,rate=4`. Lengths are means, in tokens."""

    requests: int = 200
    rate: float = 2.0
    prompt: int = 256
    output: int = 64
    # Tokens of a shared beginning. chat: all conversations have one; and turns of a conversation.
    system: int = 128
    turns: int = 4
    # zipf: how many beginnings of `system` tokens there are.
    prefixes: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses what no user could send."""
        for name in ("requests", "rate", "prompt", "output", "turns", "prefixes"):
            if not 0 < getattr(self, name) <= _MOST:
                raise ConfigError(f"--trace: {name} must be more than 0, and at most {_MOST:,}")
        if not 0 <= self.system <= _MOST:
            raise ConfigError(f"--trace: system must be 0 or more, and at most {_MOST:,}")


def poisson(traffic: Traffic) -> Iterator[TraceRequest]:
    """Users who know nothing of each other: exponential gaps, exponential lengths."""
    yield from _independent(traffic, lambda chance: chance.expovariate(traffic.rate))


def gamma(traffic: Traffic) -> Iterator[TraceRequest]:
    """The same in bursts: gaps with a coefficient of variation of 2."""
    yield from _independent(traffic, lambda chance: chance.gammavariate(0.25, 4 / traffic.rate))


def chat(traffic: Traffic) -> Iterator[TraceRequest]:
    """Conversations: each turn's prompt is all that was said before, behind one system prompt."""
    chance, arrival_s = random.Random(traffic.seed), 0.0  # noqa: S311 - repeatable chance, no secret
    begun: list[tuple[int, int]] = []  # (number of the conversation, prompt tokens of its last turn)
    for number in range(traffic.requests):
        arrival_s += chance.expovariate(traffic.rate)
        goes_on = begun and chance.random() < 1 - 1 / traffic.turns
        conversation, said = begun.pop(chance.randrange(len(begun))) if goes_on else (number, 0)
        num_prompt_tokens = traffic.system + said + _length(chance, traffic.prompt)
        num_output_tokens = _length(chance, traffic.output)
        prefix = (
            PrefixPart("system", traffic.system),
            PrefixPart(f"conversation {conversation}", num_prompt_tokens - traffic.system),
        )
        yield TraceRequest(arrival_s, num_prompt_tokens, num_output_tokens, prefix)
        begun.append((conversation, num_prompt_tokens - traffic.system + num_output_tokens))


def zipf(traffic: Traffic) -> Iterator[TraceRequest]:
    """Requests behind shared prefixes, a few of them popular: the k-th is asked for 1/k as often as the first."""
    chance, arrival_s = random.Random(traffic.seed), 0.0  # noqa: S311 - repeatable chance, no secret
    ranks = range(1, traffic.prefixes + 1)
    weights = [1 / rank for rank in ranks]
    for _ in range(traffic.requests):
        arrival_s += chance.expovariate(traffic.rate)
        (rank,) = chance.choices(ranks, weights)
        prefix = (PrefixPart(f"prefix {rank}", traffic.system),)
        num_prompt_tokens = traffic.system + _length(chance, traffic.prompt)
        yield TraceRequest(arrival_s, num_prompt_tokens, _length(chance, traffic.output), prefix)


NAMED: dict[str, Callable[[Traffic], Iterator[TraceRequest]]] = {
    "poisson": poisson,
    "gamma": gamma,
    "chat": chat,
    "zipf": zipf,
}


def is_named(text: str) -> bool:
    """Whether `--trace` means one of these, rather than a file."""
    return text.partition(":")[0] in NAMED


def made_up(text: str) -> Trace:
    """The trace of `NAME:SETTING=VALUE,...`; raises ConfigError."""
    name, _, settings = text.partition(":")
    traffic = Traffic(**dict(map(_setting, filter(None, settings.split(",")))))
    trace = Trace(text, tuple(NAMED[name](traffic)))
    if not trace.duration_s <= MAX_ARRIVAL_S:
        raise ConfigError(f"--trace: at rate={traffic.rate:g} the last request would come in centuries")
    return trace


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    defaults = asdict(Traffic())
    if name not in defaults:
        raise ConfigError(f"--trace: {name!r} is no setting of made-up traffic; {', '.join(defaults)} are")
    try:
        return name, type(defaults[name])(value)
    except ValueError as error:
        raise ConfigError(f"--trace: {name}={value!r} is no number") from error


def _independent(traffic: Traffic, gap_s: Callable[[random.Random], float]) -> Iterator[TraceRequest]:
    chance, arrival_s = random.Random(traffic.seed), 0.0  # noqa: S311 - repeatable chance, no secret
    for _ in range(traffic.requests):
        arrival_s += gap_s(chance)
        yield TraceRequest(arrival_s, _length(chance, traffic.prompt), _length(chance, traffic.output))


def _length(chance: random.Random, mean: int) -> int:
    """Exponential, up to four times the mean."""
    return min(4 * mean, 1 + int(chance.expovariate(1 / mean)))
