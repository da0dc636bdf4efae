"""Text through a model runner with known tokens: losses, and which token is the greedy choice, in chunks of one sequence."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from paceline.core.kv_layout import BlockId
from paceline.core.request import RequestId, SamplingParams, SequenceId
from paceline.engine.forward_batch import ForwardBatch, build_forward_batch
from paceline.engine.model_runner import ModelRunner
from paceline.engine.step import BlockTable, SampleTask, ScheduledSequence, SchedulerOutput

BLOCK_SIZE = 16
_CHUNK_TOKENS = 512
_SLICE_ROWS = 128  # of logits that are looked at at once; a row has tens of thousands

_TEXTS = Path(__file__).parent / "texts"
_TEXT_FILES = (
    "ferry.txt",
    "bridges.txt",
    "documents.txt",
)  # the last one is long: documents of this project, as they once were

Tokens = tuple[int, ...]


def read_texts(
    directory: Path, max_tokens: int, num_prompts: int
) -> tuple[tuple[Tokens, ...], tuple[Tokens, ...]]:
    """Texts of at most so many tokens, the long one last, and prompts; `directory` has the model's tokenizer."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = [(_TEXTS / name).read_text(encoding="utf-8") for name in _TEXT_FILES]
    prompts = (_TEXTS / "prompts.txt").read_text(encoding="utf-8").splitlines()[:num_prompts]
    return (
        tuple(tuple(tokenizer.encode(text).ids[:max_tokens]) for text in texts),
        tuple(tuple(tokenizer.encode(prompt).ids) for prompt in prompts),
    )


def losses(runner: ModelRunner, text: Tokens) -> Tensor:
    """Of each token but the first one, given those before it, [num_tokens - 1]."""
    targets = torch.tensor(text[1:])
    parts = []
    for start, logits in _read(runner, text[:-1]):
        for first in range(0, len(logits), _SLICE_ROWS):
            rows = logits[first : first + _SLICE_ROWS].float()
            expected = targets[start + first : start + first + len(rows)]
            parts.append(functional.cross_entropy(rows, expected, reduction="none"))
    return torch.cat(parts)


def generate(
    runner: ModelRunner, prompts: tuple[Tokens, ...], num_tokens: int, say: Callable[[str], None]
) -> tuple[Tokens, ...]:
    """All of them in one batch, past any end of text."""
    tables = _tables(runner, [len(prompt) + num_tokens for prompt in prompts])
    texts = [list(prompt) for prompt in prompts]
    starts = [0] * len(texts)
    for number in range(num_tokens):
        items = [_scheduled(*each) for each in zip(texts, starts, tables, strict=True)]
        starts = [len(text) for text in texts]
        logits = runner.forward(build_forward_batch(SchedulerOutput(tuple(items), ()), BLOCK_SIZE))
        for text, token_id in zip(texts, logits.argmax(-1).tolist(), strict=True):
            text.append(token_id)
        if number % 32 == 31:
            say(f"{number + 1} tokens")
    return tuple(tuple(text[len(prompt) :]) for text, prompt in zip(texts, prompts, strict=True))


def is_same_choice(runner: ModelRunner, prompt: Tokens, output: Tokens) -> Tensor:
    """[num_output_tokens], whether each is the greedy choice here too, after the same tokens.

    Up to the first that is not, this is what generating would have given.
    """
    text = prompt + output[:-1]
    choices = torch.cat([logits.argmax(-1) for _, logits in _read(runner, text)])
    return choices[len(prompt) - 1 :] == torch.tensor(output)


def one_step(runner: ModelRunner, num_sequences: int, context: int, num_tokens: int) -> ForwardBatch:
    """The next tokens of sequences with this context, whatever the cache has of it; the last one of each gives logits."""
    text = tuple(3 + i % 61 for i in range(context + num_tokens))
    tables = _tables(runner, [len(text)] * num_sequences)
    items = tuple(_scheduled(text, context, table) for table in tables)
    return build_forward_batch(SchedulerOutput(items, ()), BLOCK_SIZE)


# -- steps


def _read(runner: ModelRunner, text: Tokens) -> Iterator[tuple[int, Tensor]]:
    """The logits of every token, chunk after chunk, each with the position of its first one."""
    (table,) = _tables(runner, [len(text)])
    for start in range(0, len(text), _CHUNK_TOKENS):
        item = _scheduled(text[: start + _CHUNK_TOKENS], start, table)
        yield start, runner.forward(_all_rows(item))


def _all_rows(item: ScheduledSequence) -> ForwardBatch:
    batch = build_forward_batch(SchedulerOutput((item,), ()), BLOCK_SIZE)
    return replace(batch, sample_rows=torch.arange(len(item.token_ids)))


def _scheduled(text: Sequence[int], start: int, tables: tuple[BlockTable, ...]) -> ScheduledSequence:
    """All tokens of the text from `start` on."""
    return ScheduledSequence(
        sequence_id=SequenceId(RequestId("bench"), tables[0][0] or 0),
        token_ids=tuple(text[start:]),
        start=start,
        block_tables=tables,
        samples=(SampleTask(SamplingParams()),),
    )


def _tables(runner: ModelRunner, lengths: list[int]) -> list[tuple[BlockTable, ...]]:
    """Blocks of its own for each length, in every KV group."""
    free, num_groups = itertools.count(), len(runner.memory.layout.groups)
    return [
        tuple(tuple(BlockId(next(free)) for _ in range(-(-length // BLOCK_SIZE))) for _ in range(num_groups))
        for length in lengths
    ]
