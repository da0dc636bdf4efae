"""What keys and values in few bits cost in accuracy and save in bytes: perplexity and greedy choices of a real model.

Every type of KV sees the same tokens through the paged attention of the engine, with float32 weights, so that what differs is
the rounding of the KV alone. The last row has weights in bfloat16 too: the drift that the default settings have anyway.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from benchmarks.reading import BLOCK_SIZE, Tokens, generate, is_same_choice, losses, read_texts
from benchmarks.simulator.options import say
from paceline.engine.model_loader import LoadedModel, load_model
from paceline.engine.model_runner import ModelRunner
from paceline.launcher.models import DEFAULT_MODEL, resolve_model

BEYOND = 4096  # positions from here on are reported apart
PLAIN, QUANTISED = "float32", ("fp8", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Variant:
    """A type of weights and of KV."""

    name: str
    weights: str
    kv_dtype: str


VARIANTS = (
    Variant(PLAIN, "float32", PLAIN),
    *(Variant(kv_dtype, "float32", kv_dtype) for kv_dtype in ("bfloat16", *QUANTISED)),
    Variant("bfloat16 weights", "bfloat16", "bfloat16"),
)


@dataclass(frozen=True, slots=True)
class Material:
    """What every variant is asked: texts to read, and prompts with the greedy output of plain KV."""

    texts: tuple[Tokens, ...]
    prompts: tuple[Tokens, ...]
    outputs: tuple[Tokens, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """How one variant did."""

    name: str
    block_bytes: int
    ppl: float
    ppl_below: float  # of tokens at positions below BEYOND
    ppl_beyond: float | None  # of the others, where there are any
    greedy_agreement: float  # share of positions at which the same token follows the same tokens
    greedy_until_first: float  # share of positions before the first other token, as a mean over the prompts
    duration_s: float


def main(argv: Sequence[str]) -> int:
    """Prints the table; always 0: these are measurements, and no promise is broken by them."""
    args = _parser().parse_args(argv)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # transformers has no annotations here
    logging.set_verbosity_error()  # type: ignore[no-untyped-call] # the same
    torch.set_num_threads(args.threads)
    directory = args.model or resolve_model(DEFAULT_MODEL.name, say)
    with torch.inference_mode():
        found = list(_measure_all(directory, args))
    numbers = _numbers(found)
    _print_table(found, directory.name, args)
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return 0


def _measure_all(directory: Path, args: argparse.Namespace) -> Iterator[Found]:
    """The plain variant comes first: the others are asked what it has said."""
    loaded = {weights: load_model(directory, weights, BLOCK_SIZE) for weights in ("float32", "bfloat16")}
    longest = min(args.max_tokens, loaded[PLAIN].max_model_tokens)
    texts, prompts = read_texts(directory, longest, args.prompts)
    say(f"greedy output of plain KV: {len(prompts)} prompts, {args.new_tokens} tokens each")
    outputs = generate(_runner(loaded, VARIANTS[0], texts, prompts, args), prompts, args.new_tokens, say)
    material = Material(texts, prompts, outputs)
    for variant in VARIANTS:
        say(f"{variant.name}: {sum(map(len, texts))} tokens of text, {len(prompts)} prompts again")
        yield _measure(_runner(loaded, variant, texts, prompts, args), variant, material)


def _measure(runner: ModelRunner, variant: Variant, material: Material) -> Found:
    start_s = time.perf_counter()
    each_text = [losses(runner, text) for text in material.texts]
    below, beyond = (torch.cat(parts) for parts in zip(*map(_split, each_text), strict=True))
    same = torch.stack(
        [
            is_same_choice(runner, prompt, output)
            for prompt, output in zip(material.prompts, material.outputs, strict=True)
        ]
    )
    return Found(
        name=variant.name,
        block_bytes=runner.memory.block_bytes,
        ppl=_perplexity(torch.cat([below, beyond])),
        ppl_below=_perplexity(below),
        ppl_beyond=_perplexity(beyond) if len(beyond) else None,
        greedy_agreement=float(same.double().mean()),
        greedy_until_first=float(same.double().cumprod(1).mean()),
        duration_s=time.perf_counter() - start_s,
    )


def _runner(
    loaded: dict[str, LoadedModel],
    variant: Variant,
    texts: tuple[Tokens, ...],
    prompts: tuple[Tokens, ...],
    args: argparse.Namespace,
) -> ModelRunner:
    """With room for the longest text, or for all prompts and what follows them."""
    model = loaded[variant.weights]
    layout = replace(model.layout, dtype=variant.kv_dtype)
    room = [layout.num_blocks_for(max(map(len, prompts)) + args.new_tokens)] * len(prompts)
    return ModelRunner(
        model.model, layout, max(sum(room), *(layout.num_blocks_for(len(text)) for text in texts))
    )


# -- perplexity


def _split(found: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the tokens at positions below BEYOND, and the others."""
    return found[: BEYOND - 1], found[BEYOND - 1 :]


def _perplexity(found: Tensor) -> float:
    return math.exp(float(found.double().mean()))


# -- what is said


def _numbers(found: list[Found]) -> dict[str, Any]:
    """Perplexities as ratios to plain KV's, bytes as ratios to bfloat16's."""
    by_name = {each.name: each for each in found}
    plain, half = by_name[PLAIN], by_name["bfloat16"]
    numbers: dict[str, Any] = {"bytes_ratio": by_name["int8"].block_bytes / half.block_bytes}
    for name in QUANTISED:
        each = by_name[name]
        numbers[f"{name}_ppl_ratio"] = each.ppl / plain.ppl
        numbers[f"{name}_ppl_ratio_beyond_{BEYOND}"] = each.ppl_beyond and each.ppl_beyond / (
            plain.ppl_beyond or math.nan
        )
        numbers[f"{name}_greedy_agreement"] = each.greedy_agreement
        numbers[f"{name}_greedy_until_first"] = each.greedy_until_first
        numbers[f"{name}_bytes_ratio"] = each.block_bytes / half.block_bytes
    return {**numbers, "rows": [asdict(each) for each in found]}


def _print_table(found: list[Found], model: str, args: argparse.Namespace) -> None:
    plain = found[0]
    half = next(each for each in found if each.name == "bfloat16")
    print(
        f"{model}, float32 weights, {args.threads} threads; bytes beside bfloat16's, perplexity beside float32's"
    )
    print(
        f"greedy: {args.prompts} prompts, {args.new_tokens} tokens: same token after the same tokens; before the first other"
    )
    print(
        f"{'KV':<17}{'bytes':>7}{'ppl':>9}{'ratio':>9}{f'< {BEYOND}':>9}{f'>= {BEYOND}':>9}{'same':>8}{'before':>8}"
    )
    for each in found:
        beyond = (
            ""
            if each.ppl_beyond is None or plain.ppl_beyond is None
            else f"{each.ppl_beyond / plain.ppl_beyond:.4f}"
        )
        print(
            f"{each.name:<17}{each.block_bytes / half.block_bytes:>7.3f}{each.ppl:>9.3f}{each.ppl / plain.ppl:>9.4f}"
            f"{each.ppl_below / plain.ppl_below:>9.4f}{beyond:>9}{each.greedy_agreement:>8.4f}{each.greedy_until_first:>8.3f}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("./run bench kv-dtype", description=__doc__)
    parser.add_argument("--model", type=Path, metavar="DIR", help="another model than the default one")
    parser.add_argument(
        "--max-tokens", type=int, default=4608, metavar="N", help="longest text read (default: 4608)"
    )
    parser.add_argument(
        "--prompts", type=int, default=12, metavar="N", help="prompts (default: 12, as many as there are)"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=256, metavar="N", help="greedy tokens a prompt (default: 256)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="compute threads (default: all cores)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to a file")
    return parser
