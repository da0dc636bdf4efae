"""Fitting and measuring: cost models out of steps, on a tiny model; and a real run beside a simulated one."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.simulator.cost import CostModel, StepWork, load_cost
from benchmarks.simulator.fitting import COEFFICIENTS, fit
from benchmarks.simulator.measure import Cell, StepSample, grid, measure_round, medians, open_lab
from benchmarks.simulator.readers import load_trace
from benchmarks.simulator.real_cluster import compare_on_cluster
from benchmarks.simulator.real_run import run_real
from benchmarks.simulator.spec import ClusterSpec, scheduler_config
from paceline.launcher.config import Topology

TRUTH = CostModel("truth", 0.04, 0.003, 0.001, 0.002, 3e-5, 1e-6)
SIZES = [
    "--max-num-seqs",
    "2",
    "--max-num-batched-tokens",
    "64",
    "--max-context",
    "64",
    "--threads",
    "1",
    "--no-cluster",
]


def make_samples(noise: float = 0.0) -> list[StepSample]:
    """Steps of all kinds, as TRUTH says; some take up to `noise` times longer."""
    chance = random.Random(1)
    works = [
        StepWork(batch, batch * context, chunks, chunks * tokens, chunks * tokens * context)
        for batch in (0, 1, 4, 16)
        for context in (100, 1000)
        for chunks in (0, 1, 3)
        for tokens in (2, 64, 256)
        if batch + chunks
    ]
    return [StepSample(work, TRUTH.step_s(work) * (1 + noise * (chance.random() < 0.15))) for work in works]


def test_a_fit_finds_what_the_steps_came_from() -> None:
    """All six numbers, and no residual."""
    found = fit(make_samples(), "found", 100)
    for name in COEFFICIENTS:
        assert getattr(found.model, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6)
    assert found.residual_p95 == pytest.approx(0, abs=1e-9)
    assert found.model.kv_bytes_per_token == 100


def test_disturbed_steps_count_little() -> None:
    """A seventh of the steps took three times as long, and the numbers are nearly the same."""
    found = fit(make_samples(noise=2.0), "found", 100)
    for name in COEFFICIENTS:
        assert getattr(found.model, name) == pytest.approx(getattr(TRUTH, name), rel=0.02)
    assert found.residual_p95 > 0.5


def test_no_number_comes_out_negative() -> None:
    """Where steps get cheaper with something, that has no part in the model."""
    samples = [
        replace(each, duration_s=each.duration_s - 0.0005 * each.work.num_chunks * 5)
        for each in make_samples()
    ]
    found = fit(samples, "found", 100).model
    assert found.chunk_s == 0.0
    assert all(getattr(found, name) >= 0 for name in COEFFICIENTS)


def test_medians_are_of_the_same_step() -> None:
    """Over the rounds, one step at a time."""
    one, other = StepWork(1, 1, 0, 0, 0), StepWork(2, 2, 0, 0, 0)
    rounds = [[StepSample(one, first), StepSample(other, 10 * first)] for first in (3.0, 1.0, 2.0)]
    assert medians(rounds) == [StepSample(one, 2.0), StepSample(other, 20.0)]


def test_a_grid_has_steps_of_all_kinds() -> None:
    """Decodes alone, prompts alone, both together; within the limits, and none without work."""
    cells = grid(8, 128, 256)
    kinds = {(cell.num_decodes > 0, cell.num_prompts) for cell in cells}
    assert kinds == {(True, 0), (False, 1), (False, 4), (True, 1)}
    assert max(cell.num_decodes for cell in cells) == 8
    assert max(cell.budget for cell in cells if not cell.num_decodes and cell.num_prompts) == 128


def test_real_steps_are_what_their_cell_says(tiny_model_dir: Path) -> None:
    """Decodes at their context, prompts in chunks of the budget, both in one step; two rounds have the same steps."""
    lab = open_lab(tiny_model_dir, "float32", 16, 1024)
    cells = [Cell(3, 40), Cell(num_prompts=1, num_prompt_tokens=40, budget=16), Cell(2, 20, 1, 10, budget=12)]
    works = [sample.work for sample in measure_round(lab, cells)]
    assert works == [sample.work for sample in measure_round(lab, cells)]
    assert works[:2] == [StepWork(3, 3 * 41, 0, 0, 0), StepWork(3, 3 * 42, 0, 0, 0)]
    assert [work.num_chunk_tokens for work in works[2:5]] == [16, 16, 8]
    assert works[5] == StepWork(2, 2 * 21, 1, 10, 55)


def test_bench_fit_writes_a_cost_model(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`./run simulate --cost` takes it; numbers and residuals are printed."""
    file = tmp_path / "cost.json"
    assert main(["fit", "--model", str(tiny_model_dir), *SIZES, "--rounds", "1", "--json", str(file)]) == 0
    assert "residuals of" in capsys.readouterr().out
    model = load_cost(str(file))
    # bfloat16: two layers of two heads, keys and values of 16.
    assert model.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert model.base_s > 0


def test_bench_simulator_compares(tiny_model_dir: Path, tmp_path: Path) -> None:
    """A real run and a simulated one, made in one call, give each key of the report."""
    file = tmp_path / "numbers.json"
    trace = [
        "--trace",
        "poisson:requests=6,rate=50,prompt=20,output=4",
        "--parts",
        "2",
        "--sim-requests",
        "5",
    ]
    assert main(["simulator", "--model", str(tiny_model_dir), *SIZES, *trace, "--json", str(file)]) == 0
    numbers = json.loads(file.read_text())
    assert numbers["fit"]["num_samples"] > 0
    for key in ("ttft_p50_error", "ttft_p95_error", "itl_p50_error", "itl_p95_error", "step_error_total"):
        assert math.isfinite(numbers[key]) and numbers[key] > -1
    assert numbers["sim_requests_per_s"] > 0


def test_a_real_run_gives_every_token(tiny_model_dir: Path) -> None:
    """As many as the trace says, in order; and its steps compute all of them."""
    lab = open_lab(tiny_model_dir, "float32", 16, 2048)
    spec = ClusterSpec(decode=scheduler_config(max_num_seqs=4), num_kv_tokens=2048)
    run = run_real(load_trace("poisson:requests=8,rate=100,prompt=30,output=6"), spec, lab)
    assert all(
        record.is_finished and list(record.token_times_s) == sorted(record.token_times_s)
        for record in run.requests
    )
    needed = sum(r.request.num_prompt_tokens + r.request.num_output_tokens - 1 for r in run.requests)
    assert sum(step.work.num_tokens for step in run.steps) >= needed


@pytest.mark.thorough
def test_a_real_cluster_takes_the_ways_that_are_simulated(tiny_tokenizer_dir: Path) -> None:
    """Every request gets its tokens, by both ways; the first one, long and with nobody before it, is handed over."""
    trace = load_trace("poisson:requests=12,rate=20,prompt=30,output=4,seed=2")
    records, cost = compare_on_cluster(
        trace, Topology(1, 1), tiny_tokenizer_dir, vocab_size=480, num_probes=2
    )
    assert all(record.is_finished for record in records)
    assert {record.mode for record in records} == {"local", "disaggregated"}
    assert (records[0].mode, records[0].request.num_prompt_tokens) == ("disaggregated", 89)
    assert cost.base_s > 0
