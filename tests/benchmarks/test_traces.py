"""Traces: three formats, made-up traffic, and the tokens that requests share."""

import json

import pytest

from benchmarks.simulator.readers import BadLineError, load_trace, parse_trace
from benchmarks.simulator.trace import PrefixPart, TraceRequest, prompt_ids, spec_of
from benchmarks.simulator.traffic import made_up
from paceline.core.errors import ConfigError
from paceline.core.request import Priority

OWN = """\
{"arrival_s": 0.5, "prompt_tokens": 30, "output_tokens": 4, "prefix": [["system", 16]], "priority": "batch", "tenant": "a", "time_budget_s": 9}

{"arrival_s": 0, "prompt_ids": [5, 6, 7], "output_tokens": 1}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 3000, "input_length": 512, "output_length": 26, "hash_ids": [46]}
"""


def test_our_own_format_says_everything() -> None:
    """Each column is read, and requests come in the order of their arrival."""
    assert parse_trace("t", OWN).requests == (
        TraceRequest(0.0, 3, 1, prompt_ids=(5, 6, 7)),
        TraceRequest(0.5, 30, 4, (PrefixPart("system", 16),), Priority.BATCH, "a", time_budget_s=9.0),
    )


def test_azure_columns_are_known() -> None:
    """Times count from the first request."""
    first, second = parse_trace("t", AZURE).requests
    assert (first.arrival_s, first.num_prompt_tokens, first.num_output_tokens) == (0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)


def test_mooncake_columns_are_known() -> None:
    """Milliseconds become seconds, and hash ids name blocks, the last of which may be partial."""
    first, second = parse_trace("t", MOONCAKE).requests
    assert first.prefix == (PrefixPart("block 46", 512), PrefixPart("block 47", 88))
    assert (second.arrival_s, second.prefix) == (3.0, (PrefixPart("block 46", 512),))


def test_what_is_shared_has_the_same_tokens() -> None:
    """Requests that begin with the same parts have the same tokens there, and others behind."""
    first, second = parse_trace("t", MOONCAKE).requests
    one, other = prompt_ids(first, 0), prompt_ids(second, 1)
    assert (len(one), len(other)) == (600, 512)
    assert one[:512] == other
    alone = [prompt_ids(TraceRequest(0.0, 50, 1, (PrefixPart("system", 20),)), number) for number in (0, 1)]
    assert alone[0][:20] == alone[1][:20]
    assert not set(alone[0][20:]) & set(alone[1][20:])
    odd = TraceRequest(0.0, 20, 1, (PrefixPart("half of a character \ud800", 20),))
    assert prompt_ids(odd, 0) == prompt_ids(odd, 1)


def test_tokens_are_within_a_vocabulary() -> None:
    """A real model knows each of them, and none of them is one of its special tokens."""
    ids = prompt_ids(TraceRequest(0.0, 1000, 1), 3, vocab_size=20)
    assert set(ids) == set(range(3, 20))
    assert spec_of(TraceRequest(0.0, 1000, 1), 3, vocab_size=20).prompt_ids == ids


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "line 1: there is no request"),
        ("{", "line 1: not JSON"),
        ('{"arrival_s": 0, "prompt_tokens": 3}', "line 1: output_tokens must be a whole number"),
        ('{"arrival_s": 0, "prompt_tokens": true, "output_tokens": 1}', "line 1: prompt_tokens must be"),
        ('{"arrival_s": -1, "prompt_tokens": 3, "output_tokens": 1}', "line 1: arrival_s must be"),
        ('{"arrival_s": NaN, "prompt_tokens": 3, "output_tokens": 1}', "line 1: arrival_s must be"),
        ('{"arrival_s": 1' + "0" * 400 + ', "prompt_tokens": 3, "output_tokens": 1}', "arrival_s must be"),
        ('{"arrival_s": 1e300, "prompt_tokens": 3, "output_tokens": 1}', "line 1: arrival_s must be"),
        ('{"arrival_s": 0, "prompt_tokens": 1000000000000, "output_tokens": 1}', "prompt_tokens must be"),
        ('{"arrival_s":' * 100_000, "line 1: not JSON"),
        (
            '{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 1, "x": 1}',
            "line 1: there is no column 'x'",
        ),
        (OWN + "[]", "line 4: not a JSON object"),
        ('{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 1, "prefix": [["a", 4]]}', "is longer than"),
        ('{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 1, "prefix": [["a"]]}', "a part of prefix"),
        (
            '{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 1, "prompt_ids": [1]}',
            "there are 1 prompt_ids",
        ),
        (
            '{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 1, "priority": "vip"}',
            "priority must be one",
        ),
        ('{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 1, "tenant": 7}', "tenant must be text"),
        ("TIMESTAMP,ContextTokens\n", "line 1: this is neither"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "line 1: no request follows"),
        (AZURE + "2023-11-16 18:16:00,12\n", "line 4: GeneratedTokens must be"),
        (AZURE + "yesterday,12,3\n", "line 4: TIMESTAMP 'yesterday'"),
        (AZURE + "x" * 200_000 + ",12,3\n", "line 4: not CSV"),
        (AZURE + "2022-11-16 18:16:00,12,3\n", "line 4: its TIMESTAMP is before"),
        (
            MOONCAKE + '{"timestamp": 1, "input_length": 5, "output_length": 0}',
            "line 3: output_length must be",
        ),
        (
            MOONCAKE + '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}',
            "are too many",
        ),
        (
            MOONCAKE + '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": 1}',
            "must be a list",
        ),
    ],
)
def test_a_bad_line_is_refused(text: str, problem: str) -> None:
    """The complaint says which line it is, and what is wrong with it."""
    with pytest.raises(BadLineError, match=r"^line \d+: ") as raised:
        parse_trace("t", text)
    assert problem in str(raised.value)


@pytest.mark.parametrize("name", ["poisson", "gamma", "chat"])
def test_made_up_traffic_is_what_it_was_asked_for(name: str) -> None:
    """Rate and lengths come out about as given, and the same seed gives the same trace."""
    trace = made_up(f"{name}:requests=2000,rate=5,prompt=100,output=40,seed=1")
    assert len(trace.requests) == 2000
    assert trace.request_rate == pytest.approx(5, rel=0.15)
    mean = sum(request.num_output_tokens for request in trace.requests) / 2000
    assert mean == pytest.approx(40, rel=0.1)
    assert trace == made_up(trace.name)
    assert trace.requests != made_up(trace.name.replace("seed=1", "seed=2")).requests


def test_a_chat_goes_on_where_it_was() -> None:
    """Later turns begin with all of an earlier prompt."""
    requests = made_up("chat:requests=60,turns=4,system=8").requests
    by_conversation: dict[str, list[int]] = {}
    for request in requests:
        assert request.prefix[0] == PrefixPart("system", 8)
        by_conversation.setdefault(request.prefix[1].name, []).append(request.num_prompt_tokens)
    assert len(by_conversation) < len(requests)
    assert all(lengths == sorted(lengths) for lengths in by_conversation.values())


@pytest.mark.parametrize(
    "name",
    [
        "chat:rate=0",
        "chat:color=3",
        "gamma:rate=fast",
        "no/such/file",
        "poisson:system=-1",
        "poisson:requests=1000000000000",
        "chat:prompt=1" + "0" * 400,
        "poisson:rate=1e-300",
        "gamma:rate=1e-320",
    ],
)
def test_a_trace_that_is_not_there_is_refused(name: str) -> None:
    """Neither a wrong setting nor a wrong name is taken for anything else."""
    with pytest.raises(ConfigError, match=r"^--trace"):
        load_trace(name)


def test_a_trace_round_trips_through_json() -> None:
    """What is written as our own format is read back as it was."""
    row = {"arrival_s": 1.5, "prompt_tokens": 9, "output_tokens": 2, "prefix": [["a", 4], ["b", 4]]}
    (request,) = parse_trace("t", json.dumps(row)).requests
    assert request == TraceRequest(1.5, 9, 2, (PrefixPart("a", 4), PrefixPart("b", 4)))
