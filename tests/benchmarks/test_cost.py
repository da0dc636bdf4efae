"""The cost model: what a step's work is, and what it takes."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.simulator.cluster import simulate
from benchmarks.simulator.cost import LINEAR, TEXTBOOK, CostModel, StepWork, load_cost, work_of
from benchmarks.simulator.spec import ClusterSpec
from benchmarks.simulator.trace import Trace, TraceRequest
from paceline.core.errors import ConfigError
from paceline.engine.step import ScheduledSequence
from tests.factories import make_id


def test_a_step_is_added_up() -> None:
    """Decodes and chunks count apart, and each token attends to all before it and to itself."""
    decode = ScheduledSequence(make_id("a"), (1,), 9, ())
    chunk = ScheduledSequence(make_id("b"), (1, 2, 3), 10, ())
    work = work_of([decode, chunk, decode])
    assert work == StepWork(2, 20, 1, 3, 11 + 12 + 13)
    assert (work.num_sequences, work.num_tokens) == (3, 5)


def test_the_textbook_model() -> None:
    """5 ms a step, 0.3 ms a decoding sequence, 0.2 ms a token of a prompt; with the linear one batching cannot help."""
    work = StepWork(
        num_decodes=8, num_decode_context=800, num_chunks=1, num_chunk_tokens=100, num_chunk_context=5050
    )
    assert TEXTBOOK.step_s(work) == pytest.approx(0.005 + 8 * 0.0003 + 100 * 0.0002)
    eight, one = StepWork(8, 0, 0, 0, 0), StepWork(1, 0, 0, 0, 0)
    assert LINEAR.step_s(eight) == 8 * LINEAR.step_s(one)
    assert TEXTBOOK.step_s(eight) < 2 * TEXTBOOK.step_s(one)


def test_a_model_round_trips_through_its_file(tmp_path: Path) -> None:
    """What was saved is loaded, by itself or inside of what a fit has written."""
    model = CostModel(
        "mine", 0.01, 0.001, 0.002, 0.1, 1e-6, 1e-7, 0.001, 2e9, 23_040, (0.9, 1.3), 0.003, 0.001
    )
    (tmp_path / "cost.json").write_text(json.dumps(asdict(model)))
    assert load_cost(str(tmp_path / "cost.json")) == model
    (tmp_path / "fit.json").write_text(json.dumps({"cost_model": asdict(model), "r2": 0.99}))
    assert load_cost(str(tmp_path / "fit.json")) == model


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "{",
        '{"name": "x", "base_s": -1, "decode_s": 1, "chunk_token_s": 1}',
        '{"name": "x", "base_s": 1, "decode_s": 1, "chunk_token_s": 1, "noise": [1, 0]}',
        '{"name": "x", "base_s": 1, "decode_s": 1, "chunk_token_s": 1, "noise": 2}',
        '{"name": "x", "base_s": 1, "decode_s": 1, "chunk_token_s": 1, "kv_bytes_per_token": 0.5}',
        '{"name": "x", "base_s": 1, "decode_s": 1, "chunk_token_s": 1' + "0" * 400 + "}",
        '{"name":' * 100_000,
    ],
)
def test_a_file_that_is_no_cost_model_is_refused(text: str, tmp_path: Path) -> None:
    """It is named, in one line."""
    (tmp_path / "cost.json").write_text(text)
    with pytest.raises(ConfigError, match="cost model"):
        load_cost(str(tmp_path / "cost.json"))


def test_time_never_stands_still() -> None:
    """A model in which a step could take no time is refused: a simulation with it would not come to its end."""
    with pytest.raises(ConfigError, match="must take time"):
        CostModel("nothing", 0.0, 0.0, 0.001)
    with pytest.raises(ConfigError, match="neither"):
        load_cost("no/such/file")


def test_noise_is_gone_through_in_order_and_again() -> None:
    """Steps take what the model says times one ratio after the other, so that slow moments are as long as they were."""
    model = replace(TEXTBOOK, noise=(1.0, 1.0, 3.0))
    trace = Trace("one", (TraceRequest(0.0, 10, 6),))
    steps = simulate(trace, ClusterSpec(disaggregate="never"), model).steps
    ratios = [(step.end_s - step.start_s) / TEXTBOOK.step_s(step.work) for step in steps]
    assert ratios == pytest.approx([1, 1, 3, 1, 1, 3])
