"""`./run tune`: lengths, coverage, pins and a proposal."""

import json
from pathlib import Path

import pytest

from benchmarks.simulator.prefixes import choose_pins, coverage
from benchmarks.simulator.trace import PrefixPart, Trace, TraceRequest
from benchmarks.tune import main

SYSTEM = tuple(range(100, 140))


def make_trace(*shares: tuple[str, int, int]) -> Trace:
    """Requests with prefixes: (name, tokens of the prefix, how many requests)."""
    requests = [
        TraceRequest(float(index), 100, 10, (PrefixPart(name, num_tokens),) if num_tokens else ())
        for name, num_tokens, count in shares
        for index in range(count)
    ]
    return Trace("toy", tuple(requests))


def write_own(file: Path, num_shared: int, num_other: int) -> str:
    """A trace with real tokens, of which some begin with SYSTEM."""
    rows = [
        {
            "arrival_s": index,
            "output_tokens": 4,
            "prompt_ids": [*(SYSTEM if index < num_shared else [index]), index, 7],
        }
        for index in range(num_shared + num_other)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_coverage_is_by_length() -> None:
    """Only whole blocks count, and only what at least two requests begin with."""
    found = coverage(make_trace(("a", 40, 6), ("b", 70, 2), ("c", 100, 1), ("", 0, 1)), block_size=16)
    by_length = {each.num_tokens: (each.counts, each.share_of(1), each.share_of(4)) for each in found}
    assert by_length == {
        16: ((6, 2), 0.6, 0.8),
        32: ((6, 2), 0.6, 0.8),
        48: ((2,), 0.2, 0.2),
        64: ((2,), 0.2, 0.2),
    }


def test_pins_are_the_longest_that_pay() -> None:
    """No more of them than it takes to cover over half of the requests; none where none do."""
    trace = make_trace(("a", 64, 4), ("b", 64, 3), ("", 0, 3))
    found = coverage(trace, 16)
    pins = choose_pins(trace, found, 4, 0.5)
    assert pins is not None
    assert (pins.num_tokens, len(pins.prefixes), pins.share, pins.num_tokens_held) == (64, 2, 0.7, 128)
    assert not pins.is_real
    assert choose_pins(trace, found, 1, 0.5) is None
    assert choose_pins(make_trace(("", 0, 5)), [], 4, 0.5) is None


def test_pins_are_written_where_the_trace_has_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One object a line, with the prefix's whole blocks."""
    trace, pinned = write_own(tmp_path / "t.jsonl", 6, 4), tmp_path / "pinned.jsonl"
    assert main(["--trace", trace, "--pinned", str(pinned)]) == 0
    assert "pinning pays: 1 of 32 tokens cover 60.0%" in capsys.readouterr().out
    assert [json.loads(line) for line in pinned.read_text().splitlines()] == [
        {"token_ids": list(SYSTEM[:32])}
    ]


@pytest.mark.parametrize(
    ("trace", "problem"),
    [("chat:requests=20", "lengths and names only"), ("poisson:requests=20", "no prefix is worth pinning")],
)
def test_pins_without_tokens_are_refused(
    trace: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says why, and writes nothing."""
    with pytest.raises(SystemExit) as raised:
        main(["--trace", trace, "--pinned", str(tmp_path / "pinned.jsonl")])
    assert raised.value.code == 2
    assert problem in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--max-pins", "0"], "--max-pins"),
        (["--pinned", "no/such/directory/pinned.jsonl"], "--pinned no/such"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    flags: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with status 2 and says what is wrong."""
    with pytest.raises(SystemExit) as raised:
        main(["--trace", write_own(tmp_path / "t.jsonl", 6, 4), *flags])
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


def test_settings_are_proposed_for_a_promise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Budget and block size for the topology that was given; without a promise there is no proposal."""
    file, trace = tmp_path / "n.json", "poisson:requests=20,rate=5,prompt=50,output=6"
    slo = ["--slo", "ttft=500ms,itl=50ms", "--topology", "0P1D"]
    assert main(["--trace", trace, "--json", str(file), *slo]) == 0
    assert "proposal, which keeps ttft=500ms,itl=50ms at p95" in capsys.readouterr().out
    proposal = json.loads(file.read_text())["proposal"]
    assert proposal["topology"] == "0P1D"
    assert {"max_num_batched_tokens", "block_size"} <= proposal.keys()
    assert main(["--trace", trace, "--json", str(file)]) == 0
    assert json.loads(file.read_text())["proposal"] is None
    assert "pinning does not pay" in capsys.readouterr().out


def test_lengths_are_quantiles(tmp_path: Path) -> None:
    """P50, P95 and P99 of prompts and outputs."""
    file = tmp_path / "t.jsonl"
    rows = [{"arrival_s": 0, "prompt_tokens": count, "output_tokens": 2 * count} for count in range(1, 101)]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert main(["--trace", str(file), "--json", str(tmp_path / "n.json")]) == 0
    numbers = json.loads((tmp_path / "n.json").read_text())
    assert numbers["lengths"] == {"prompt": [50, 95, 99], "output": [100, 190, 198]}
