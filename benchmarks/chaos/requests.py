"""The requests of the load: every kind that a client may send, each of them with one right answer."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.client import GenerateOptions

_NUM_PREFIXES = 6
_LONGEST_PREFIX = 400


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as the client takes it. It asks for the same answer however often it is sent."""

    prompt: str | tuple[int, ...]
    options: GenerateOptions


def make_requests(seed: int, count: int, vocab_size: int) -> list[Asked]:
    """Prompts that share beginnings, short and long; greedy and seeded, one candidate and several, log probabilities, stops."""
    rng = random.Random(seed)  # noqa: S311 - to be drawn again, no secret
    prefixes = [_token_ids(rng, rng.randint(1, _LONGEST_PREFIX), vocab_size) for _ in range(_NUM_PREFIXES)]
    return [_request(rng, number, prefixes, vocab_size) for number in range(count)]


def with_stop(asked: Asked, text: str, token_ids: Sequence[int], rng: random.Random) -> Asked | None:
    """The same, ended by something that its answer is known to contain: a stop string, or a stop token."""
    options = asked.options.copy()
    if rng.random() < 0.5 and len(text) > 8:
        begin = rng.randrange(len(text) // 2, len(text) - 3)
        options["stop"] = ["never in it", text[begin : begin + 3]]
    elif len(token_ids) > 2:
        options["stop_token_ids"] = [token_ids[rng.randrange(1, len(token_ids))]]
    else:
        return None
    return Asked(asked.prompt, options)


def _request(rng: random.Random, number: int, prefixes: Sequence[tuple[int, ...]], vocab_size: int) -> Asked:
    options = GenerateOptions(
        max_tokens=rng.choice((1, 2, 8, 40, 120)),
        seed=rng.randrange(1 << 32),
        temperature=rng.choice((0.0, 0.0, 0.9)),
        ignore_eos=rng.random() < 0.5,
        priority=rng.choice(("realtime", "standard", "standard", "batch")),
    )
    if options["temperature"]:
        options["top_p"] = rng.choice((None, 0.9))
        options["n"] = rng.choice((1, 1, 2, 3))
    match rng.randrange(6):
        case 0:
            options["num_top_logprobs"] = rng.randrange(4)
        case 1:
            options["prompt_logprobs"] = True
        case 2:
            options["bypass_cache"] = True
    if number % 7 == 0:
        return Asked(f"Request {number} of a rider. " * rng.randint(1, 20), options)
    own = _token_ids(rng, rng.randint(1, 200), vocab_size)
    return Asked(rng.choice((*prefixes, ())) + own, options)


def _token_ids(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab_size) for _ in range(count))
