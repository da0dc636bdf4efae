"""What is asked for in each workload: conversations, how many of them at once, or when each begins. No server is known here."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.simulator.trace import PrefixPart, Trace, TraceRequest, prompt_ids

_SEED = 42
# The coefficient of variation of the gaps of bursts is 2, that of independent users 1.
_BURST_SHAPE = 0.25


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user adds to a conversation, and how long the answer is."""

    new_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns one after the other, each behind all that was said before. Those of one `group` are counted together."""

    turns: tuple[Turn, ...]
    start_s: float = 0.0
    group: str = "all"


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations: `concurrency` of them at once, each next one when one has ended; or, without it, each at its `start_s`.

    `key` names its figures.
    """

    key: str
    conversations: tuple[Conversation, ...]
    concurrency: int | None = None

    @property
    def num_turns(self) -> int:
        """Requests, all together."""
        return sum(len(each.turns) for each in self.conversations)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says of workloads.

    Prompts differ from one `run` to the next, so that no run finds the last one's prefixes; `rate` is in conversations a second.
    """

    run: int
    vocab_size: int
    concurrencies: tuple[int, ...] = (1, 8, 32)
    rate: float = 1.0

    def ids(self, name: str, num_tokens: int) -> tuple[int, ...]:
        """Tokens that this run has under this name, and no other run."""
        part = PrefixPart(f"serve/{self.run}/{name}", num_tokens)
        return prompt_ids(TraceRequest(0.0, num_tokens, 1, (part,)), 0, self.vocab_size)


def mixed(asked: Asked) -> Iterator[Workload]:
    """64 requests, prompts of 16 to 256 tokens and outputs of 16 to 256; once for each concurrency."""
    chance = random.Random(_SEED)  # noqa: S311 - repeatable chance, no secret
    lengths = [(chance.randint(16, 256), chance.randint(16, 256)) for _ in range(64)]
    for concurrency in asked.concurrencies:
        requests = [
            _request(asked, f"mixed {concurrency} {number}", *each) for number, each in enumerate(lengths)
        ]
        yield Workload(f"mixed_{concurrency}", tuple(requests), concurrency)


def interference(asked: Asked) -> Iterator[Workload]:
    """8 answers of 200 tokens, while a prompt of 3,000 to 3,800 tokens comes every 1.5 s, six times."""
    chance = random.Random(_SEED)  # noqa: S311 - repeatable chance, no secret
    steady = [_request(asked, f"steady {number}", 64, 200, group="steady") for number in range(8)]
    long = [
        _request(
            asked, f"long {number}", chance.randint(3000, 3800), 4, group="long", start_s=1.5 * (number + 1)
        )
        for number in range(6)
    ]
    yield Workload("interference_8", (*steady, *long))


def shared_prefix(asked: Asked) -> Iterator[Workload]:
    """32 requests behind one system prompt of 1,000 tokens, 8 at once."""
    system = asked.ids("system", 1000)
    requests = [
        Conversation((Turn((*system, *asked.ids(f"after system {number}", 32)), 32),)) for number in range(32)
    ]
    yield Workload("shared_prefix_8", tuple(requests), 8)


def chat(asked: Asked) -> Iterator[Workload]:
    """8 conversations of 10 turns, 4 at once: 40 new tokens and 40 of answer a turn."""
    conversations = [
        Conversation(tuple(Turn(asked.ids(f"chat {number} {turn}", 40), 40) for turn in range(10)))
        for number in range(8)
    ]
    yield Workload("chat_4", tuple(conversations), 4)


def poisson(asked: Asked) -> Iterator[Workload]:
    """64 requests of users who know nothing of each other: prompts of 16 to 256 tokens, outputs of 16 to 128."""
    yield _arriving(asked, "poisson", lambda chance: chance.expovariate(asked.rate))


def burst(asked: Asked) -> Iterator[Workload]:
    """The same, in bursts: gaps between arrivals with a coefficient of variation of 2."""
    yield _arriving(
        asked, "burst", lambda chance: chance.gammavariate(_BURST_SHAPE, 1 / _BURST_SHAPE / asked.rate)
    )


def warm_up(asked: Asked) -> Workload:
    """What a server that has just started is asked before anything is measured."""
    requests = [_request(asked, f"warm up {number}", 64, 8) for number in range(4)]
    return Workload("warm_up", tuple(requests), 4)


def traced(trace: Trace, asked: Asked) -> Workload:
    """A trace's requests, each when it came."""
    names = [
        tuple(part._replace(name=f"serve/{asked.run}/{part.name}") for part in request.prefix)
        for request in trace.requests
    ]
    return Workload(
        "trace",
        tuple(
            Conversation(
                (
                    Turn(
                        prompt_ids(replace(request, prefix=prefix), number, asked.vocab_size),
                        request.num_output_tokens,
                    ),
                ),
                request.arrival_s,
            )
            for number, (request, prefix) in enumerate(zip(trace.requests, names, strict=True))
        ),
    )


WORKLOADS: dict[str, Callable[[Asked], Iterator[Workload]]] = {
    "mixed": mixed,
    "interference": interference,
    "shared-prefix": shared_prefix,
    "chat": chat,
    "poisson": poisson,
    "burst": burst,
}


def chosen(names: Sequence[str], asked: Asked) -> list[Workload]:
    """All that the names stand for."""
    return [workload for name in names for workload in WORKLOADS[name](asked)]


def _request(
    asked: Asked,
    name: str,
    num_prompt_tokens: int,
    num_output_tokens: int,
    *,
    group: str = "all",
    start_s: float = 0.0,
) -> Conversation:
    return Conversation((Turn(asked.ids(name, num_prompt_tokens), num_output_tokens),), start_s, group)


def _arriving(asked: Asked, key: str, gap_s: Callable[[random.Random], float]) -> Workload:
    chance, start_s, requests = random.Random(_SEED), 0.0, list[Conversation]()  # noqa: S311 - repeatable chance, no secret
    for number in range(64):
        num_prompt_tokens, num_output_tokens = chance.randint(16, 256), chance.randint(16, 128)
        requests.append(
            _request(asked, f"{key} {number}", num_prompt_tokens, num_output_tokens, start_s=start_s)
        )
        start_s += gap_s(chance)
    return Workload(key, tuple(requests))
