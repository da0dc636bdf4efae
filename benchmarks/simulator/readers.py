"""Reads traces: our own JSON Lines, and the columns of the public Azure and Mooncake ones. The content says which it is.

A line that is not what its format says is refused, with its number: a trace that is read in part would be another one.
"""

import csv
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.simulator.trace import MAX_ARRIVAL_S, MAX_TOKENS, PrefixPart, Trace, TraceRequest
from benchmarks.simulator.traffic import is_named, made_up
from paceline.core.errors import ConfigError
from paceline.core.request import Priority

# Blocks of this many tokens have the hash ids of a Mooncake trace.
MOONCAKE_BLOCK_TOKENS = 512
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_OWN = frozenset(
    {
        "arrival_s",
        "prompt_tokens",
        "output_tokens",
        "prefix",
        "priority",
        "tenant",
        "prompt_ids",
        "time_budget_s",
    }
)

Lines = list[tuple[int, str]]
Reader = Callable[[Lines], Iterator[TraceRequest]]


class BadLineError(ValueError):
    """What is wrong with a line, and which it is."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(f"line {number}: {problem}")


def load_trace(name_or_file: str) -> Trace:
    """A made-up trace, or one of a file; raises ConfigError."""
    if is_named(name_or_file):
        return made_up(name_or_file)
    path = Path(name_or_file)
    try:
        return parse_trace(path.name, path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"--trace {name_or_file}: neither a made-up trace nor a file: {error.strerror}"
        ) from error
    except (BadLineError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {name_or_file}: {error}") from error


def parse_trace(name: str, text: str) -> Trace:
    """The requests, the first at 0 s, by their arrival; raises BadLineError."""
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise BadLineError(1, "there is no request")
    requests = sorted(_reader_of(lines)(lines), key=lambda request: request.arrival_s)
    if not requests:
        raise BadLineError(lines[-1][0], "no request follows the column names")
    return Trace(name, tuple(requests))


def _reader_of(lines: Lines) -> Reader:
    number, first = lines[0]
    if not first.lstrip().startswith("{"):
        return read_azure
    return read_mooncake if "input_length" in _object(number, first) else read_own


def read_own(lines: Lines) -> Iterator[TraceRequest]:
    """One object a line; `arrival_s` and `output_tokens`, and `prompt_tokens` or `prompt_ids`, must be there."""
    for number, line in lines:
        row = _object(number, line)
        unknown = sorted(row.keys() - _OWN)
        if unknown:
            raise BadLineError(
                number, f"there is no column {unknown[0]!r}; columns are {', '.join(sorted(_OWN))}"
            )
        prompt_ids = _ids(number, row.get("prompt_ids", []))
        if prompt_ids:
            row.setdefault("prompt_tokens", len(prompt_ids))
        num_prompt_tokens = _count(number, row, "prompt_tokens")
        if prompt_ids and len(prompt_ids) != num_prompt_tokens:
            raise BadLineError(
                number, f"prompt_tokens is {num_prompt_tokens}, and there are {len(prompt_ids)} prompt_ids"
            )
        yield TraceRequest(
            arrival_s=_seconds(number, row, "arrival_s"),
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=_count(number, row, "output_tokens"),
            prefix=_prefix(number, row.get("prefix", []), num_prompt_tokens),
            priority=_priority(number, row.get("priority", "standard")),
            tenant=_text(number, row, "tenant"),
            prompt_ids=prompt_ids,
            time_budget_s=_seconds(number, row, "time_budget_s") if "time_budget_s" in row else None,
        )


def read_mooncake(lines: Lines) -> Iterator[TraceRequest]:
    """`timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids` of 512-token blocks of the prompt."""
    for number, line in lines:
        row = _object(number, line)
        num_prompt_tokens = _count(number, row, "input_length")
        hash_ids = row.get("hash_ids", [])
        if not isinstance(hash_ids, list) or not all(type(each) in {int, str} for each in hash_ids):
            raise BadLineError(number, "hash_ids must be a list of numbers")
        if len(hash_ids) > -(-num_prompt_tokens // MOONCAKE_BLOCK_TOKENS):
            raise BadLineError(
                number, f"{len(hash_ids)} hash_ids are too many for {num_prompt_tokens} tokens"
            )
        left = [num_prompt_tokens - MOONCAKE_BLOCK_TOKENS * index for index in range(len(hash_ids))]
        yield TraceRequest(
            arrival_s=_seconds(number, row, "timestamp", per_second=1e3),
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=_count(number, row, "output_length"),
            prefix=tuple(
                PrefixPart(f"block {hash_id}", min(MOONCAKE_BLOCK_TOKENS, tokens))
                for hash_id, tokens in zip(hash_ids, left, strict=True)
            ),
        )


def read_azure(lines: Lines) -> Iterator[TraceRequest]:
    """A CSV file with the columns TIMESTAMP, ContextTokens and GeneratedTokens, among others; no prefixes."""
    (head_number, head), *rest = lines
    columns = [column.strip() for column in _cells(head_number, head)]
    missing = [column for column in _AZURE_COLUMNS if column not in columns]
    if missing:
        raise BadLineError(
            head_number,
            f"this is neither a JSON object nor the head of a CSV file with {', '.join(_AZURE_COLUMNS)}",
        )
    first_s: float | None = None
    for number, line in rest:
        row = dict(zip(columns, _cells(number, line), strict=False))
        arrival_s = _timestamp_s(number, row.get("TIMESTAMP", ""))
        first_s = arrival_s if first_s is None else first_s
        if arrival_s < first_s:
            raise BadLineError(number, "its TIMESTAMP is before that of the first request")
        yield TraceRequest(
            arrival_s=arrival_s - first_s,
            num_prompt_tokens=_csv_count(number, row, "ContextTokens"),
            num_output_tokens=_csv_count(number, row, "GeneratedTokens"),
        )


# -- one value


def _object(number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLineError(number, f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadLineError(number, "not a JSON object")
    return row


def _cells(number: int, line: str) -> list[str]:
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        raise BadLineError(number, f"not CSV: {error}") from error


def _count(number: int, row: dict[str, Any], name: str) -> int:
    value = row.get(name)
    # Not isinstance: true is an int to Python, and a mistake to us.
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        given = json.dumps(value)
        raise BadLineError(number, f"{name} must be a whole number from 1 to {MAX_TOKENS:,}, not {given}")
    return value


def _csv_count(number: int, row: dict[str, str], name: str) -> int:
    try:
        return _count(number, {name: int(row.get(name, ""))}, name)
    except ValueError as error:
        if isinstance(error, BadLineError):
            raise
        raise BadLineError(number, f"{name} must be a whole number, not {row.get(name)!r}") from error


def _seconds(number: int, row: dict[str, Any], name: str, per_second: float = 1.0) -> float:
    value, most = row.get(name), MAX_ARRIVAL_S * per_second
    if type(value) not in {int, float} or not 0 <= value <= most:  # type: ignore[operator] # numbers by now
        raise BadLineError(number, f"{name} must be a number from 0 to {most:g}, not {json.dumps(value)}")
    return value / per_second  # type: ignore[operator] # the same


def _timestamp_s(number: int, text: str) -> float:
    try:
        stamp = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise BadLineError(number, f"TIMESTAMP {text!r} is no date and time") from error
    return (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()


def _prefix(number: int, parts: object, num_prompt_tokens: int) -> tuple[PrefixPart, ...]:
    if not isinstance(parts, list):
        raise BadLineError(number, 'prefix must be a list such as [["system", 128]]')
    prefix = []
    for part in parts:
        if not (isinstance(part, list) and len(part) == 2 and type(part[1]) is int and part[1] >= 1):
            raise BadLineError(number, f"a part of prefix must be [name, tokens], not {json.dumps(part)}")
        prefix.append(PrefixPart(str(part[0]), part[1]))
    if sum(part.num_tokens for part in prefix) > num_prompt_tokens:
        raise BadLineError(number, f"its prefix is longer than its prompt of {num_prompt_tokens} tokens")
    return tuple(prefix)


def _ids(number: int, ids: object) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < 1 << 32 for each in ids):
        raise BadLineError(number, "prompt_ids must be a list of token ids")
    return tuple(ids)


def _priority(number: int, name: object) -> Priority:
    names = [each.name.lower() for each in Priority]
    if name not in names:
        raise BadLineError(number, f"priority must be one of {', '.join(names)}, not {json.dumps(name)}")
    return Priority[str(name).upper()]


def _text(number: int, row: dict[str, Any], name: str) -> str:
    value = row.get(name, "")
    if not isinstance(value, str):
        raise BadLineError(number, f"{name} must be text, not {json.dumps(value)}")
    return value
