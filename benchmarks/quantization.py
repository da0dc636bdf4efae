"""What weights in fewer bits cost in accuracy and save in time: perplexity, greedy choices, and steps of every kind by turns.

All variants are one model in one process, with attention and KV alike: what differs is the linear layers alone.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from benchmarks.reading import BLOCK_SIZE, Tokens, generate, is_same_choice, losses, one_step, read_texts
from benchmarks.simulator.options import say
from paceline.engine.model_loader import LoadedModel, load_model
from paceline.engine.model_runner import ModelRunner
from paceline.engine.quantization import quantised
from paceline.launcher.models import DEFAULT_MODEL, resolve_model
from paceline.runtime.processor import resolve_dtype
from paceline.runtime.serving import QUANTIZATIONS

PLAIN, *FEW = QUANTIZATIONS
CONTEXT = 256  # tokens before the one that is decoded


@dataclass(frozen=True, slots=True)
class Work:
    """A kind of step: sequences, the tokens that each has behind it, and those that are computed."""

    name: str
    num_sequences: int
    context: int
    num_tokens: int


WORKS = (
    *(Work(f"decode_{number}", number, CONTEXT, 1) for number in (1, 8, 32)),
    Work("chunk_512", 1, 0, 512),
)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How one variant reads and chooses."""

    ppl: float
    greedy_agreement: float  # share of positions at which the same token follows the same tokens
    greedy_until_first: float  # share of positions before the first other token, as a mean over the prompts


@dataclass(frozen=True, slots=True)
class Found:
    """How one variant did; times by the names of WORKS."""

    name: str
    accuracy: Accuracy
    best_ms: dict[str, float]
    speedup: dict[str, float]  # the median over turns of the plain variant's time over this one's


def main(argv: Sequence[str]) -> int:
    """Prints the table; always 0: these are measurements, and no promise is broken by them."""
    args = _parser().parse_args(argv)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # transformers has no annotations here
    logging.set_verbosity_error()  # type: ignore[no-untyped-call] # the same
    torch.set_num_threads(args.threads)
    directory = args.model or resolve_model(DEFAULT_MODEL.name, say)
    dtype = resolve_dtype(args.dtype)
    with torch.inference_mode():
        found = _measure_all(directory, dtype, args)
    _print_table(found, f"{directory.name}, {dtype} around the weights, {args.threads} threads", args)
    if args.json:
        args.json.write_text(json.dumps(_numbers(found), indent=1) + "\n", encoding="utf-8")
    return 0


def _measure_all(directory: Path, dtype: str, args: argparse.Namespace) -> list[Found]:
    loaded = {name: quantised(load_model(directory, dtype, BLOCK_SIZE), name) for name in QUANTIZATIONS}
    longest = min(args.max_tokens, loaded[PLAIN].max_model_tokens)
    texts, prompts = read_texts(directory, longest, args.prompts)
    runners = {name: _runner(model, texts, prompts, args) for name, model in loaded.items()}
    say(f"greedy output of the plain weights: {len(prompts)} prompts, {args.new_tokens} tokens each")
    outputs = generate(runners[PLAIN], prompts, args.new_tokens, say)
    accuracies = {}
    for name, runner in runners.items():
        say(f"{name}: {sum(map(len, texts))} tokens of text, {len(prompts)} prompts again")
        accuracies[name] = _accuracy(runner, texts, prompts, outputs)
    say(f"steps: {', '.join(work.name for work in WORKS)}")
    times = {work.name: _times(runners, work, args.turns) for work in WORKS}
    return [_found(name, accuracies[name], times) for name in QUANTIZATIONS]


# -- accuracy


def _runner(
    loaded: LoadedModel, texts: Iterable[Tokens], prompts: Sequence[Tokens], args: argparse.Namespace
) -> ModelRunner:
    """With room for the longest text, for all prompts and what follows them, and for every kind of step."""
    blocks_for = loaded.layout.num_blocks_for
    room = [
        *(blocks_for(len(text)) for text in texts),
        len(prompts) * blocks_for(max(map(len, prompts)) + args.new_tokens),
        *(work.num_sequences * blocks_for(work.context + work.num_tokens) for work in WORKS),
    ]
    return ModelRunner(loaded.model, loaded.layout, max(room))


def _accuracy(
    runner: ModelRunner, texts: Iterable[Tokens], prompts: Iterable[Tokens], outputs: Iterable[Tokens]
) -> Accuracy:
    found = torch.cat([losses(runner, text) for text in texts])
    pairs = zip(prompts, outputs, strict=True)
    same = torch.stack([is_same_choice(runner, prompt, output) for prompt, output in pairs]).double()
    return Accuracy(math.exp(float(found.double().mean())), float(same.mean()), float(same.cumprod(1).mean()))


# -- time


def _times(runners: dict[str, ModelRunner], work: Work, num_turns: int) -> dict[str, list[float]]:
    """Seconds of each variant in each turn; what else runs on the machine hits all of them, and the first turn is none."""
    turns = [dict(_turn(runners, work)) for _ in range(num_turns + 1)][1:]
    return {name: [turn[name] for turn in turns] for name in runners}


def _turn(runners: dict[str, ModelRunner], work: Work) -> Iterator[tuple[str, float]]:
    for name, runner in runners.items():
        step = one_step(runner, work.num_sequences, work.context, work.num_tokens)
        start_s = time.perf_counter()
        runner.forward(step)
        yield name, time.perf_counter() - start_s


def _found(name: str, accuracy: Accuracy, times: dict[str, dict[str, list[float]]]) -> Found:
    return Found(
        name,
        accuracy,
        best_ms={work: 1e3 * min(each[name]) for work, each in times.items()},
        speedup={
            work: statistics.median(plain / few for plain, few in zip(each[PLAIN], each[name], strict=True))
            for work, each in times.items()
        },
    )


# -- what is said


def _numbers(found: list[Found]) -> dict[str, Any]:
    """Perplexities and times as ratios to those of the plain weights."""
    plain, *others = found
    numbers: dict[str, Any] = {}
    for each in others:
        numbers[f"{each.name}_ppl_ratio"] = each.accuracy.ppl / plain.accuracy.ppl
        numbers[f"{each.name}_greedy_agreement"] = each.accuracy.greedy_agreement
        numbers[f"{each.name}_greedy_until_first"] = each.accuracy.greedy_until_first
        numbers |= {f"{each.name}_{work}_speedup": ratio for work, ratio in each.speedup.items()}
    return {**numbers, "rows": [asdict(each) for each in found]}


def _print_table(found: list[Found], about: str, args: argparse.Namespace) -> None:
    plain = found[0]
    print(f"{about}; perplexity beside the plain weights'")
    print(
        f"greedy: {args.prompts} prompts, {args.new_tokens} tokens: same token after the same tokens; before the first other"
    )
    print(
        f"steps: least of {args.turns} turns in ms, and how many times as fast as the plain weights (median)"
    )
    head = "".join(f"{work.name:>18}" for work in WORKS)
    print(f"{'weights':<9}{'ppl':>9}{'ratio':>9}{'same':>8}{'before':>8}{head}")
    for each in found:
        accuracy = each.accuracy
        steps = "".join(f"{each.best_ms[work.name]:>11.2f}{each.speedup[work.name]:>6.2f}x" for work in WORKS)
        print(
            f"{each.name:<9}{accuracy.ppl:>9.3f}{accuracy.ppl / plain.accuracy.ppl:>9.4f}"
            f"{accuracy.greedy_agreement:>8.4f}{accuracy.greedy_until_first:>8.3f}{steps}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("./run bench quantization", description=__doc__)
    parser.add_argument("--model", type=Path, metavar="DIR", help="another model than the default one")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="what is computed in around the weights (default: auto)",
    )
    numbers = (
        ("--max-tokens", 2048, "longest text read"),
        ("--prompts", 12, "prompts, of which there are 12"),
        ("--new-tokens", 128, "greedy tokens a prompt"),
        ("--turns", 15, "times that every kind of step is measured"),
        ("--threads", os.cpu_count() or 1, "compute threads"),
    )
    for flag, default, text in numbers:
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to a file")
    return parser
