"""`./run bench` as a shell sees it."""

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks import kv_transports, scheduler_cost
from benchmarks.experts import measure_groups
from benchmarks.kv import main as kv
from benchmarks.scheduling import main as scheduling
from benchmarks.simulator.options import write_json
from paceline.core.errors import ConfigError, NoEndpointError


def test_an_error_is_a_line_and_a_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is Ctrl-C."""
    for error, status in ((NoEndpointError("nobody is there"), 1), (KeyboardInterrupt(), 130)):

        def fail(_: object, error: BaseException = error) -> int:
            """As a benchmark may."""
            raise error

        monkeypatch.setattr(bench, "main", fail)
        assert bench.run(["fit"]) == status
    assert "nobody is there" in capsys.readouterr().err


def test_numbers_that_cannot_be_written_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They may have taken minutes."""
    with pytest.raises(ConfigError, match="--json"):
        write_json(tmp_path / "no" / "directory.json", {"speed": 3})
    assert '"speed": 3' in capsys.readouterr().out


@pytest.mark.thorough
def test_bench_scheduling_gives_its_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs no model: every number that is promised, within what the policies promise."""
    monkeypatch.setattr(scheduler_cost, "_NUM_STEPS", 5)
    assert scheduling(["--no-real", "--requests", "150", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["textbook_waste_slot_use"] == pytest.approx(0.334, abs=0.001)
    assert found["continuous_total_s"] <= 0.6 * found["static_total_s"]
    assert found["continuous_slot_use"] > 0.9 > found["static_slot_use"]
    assert found["overload_throughput_ratio"] >= 0.95
    assert found["preempted_request_share"] < 0.05
    assert found["recomputed_token_share"] < 0.1
    assert found["head_of_line_ttft_p95_ratio"] < 1.5
    assert found["fast_lane_ttft_p99_ratio"] < 1.5
    assert found["scheduler_step_us_p50"] > 0


@pytest.mark.slow
def test_groups_of_experts_need_fewer_of_them() -> None:
    """Of as many sequences, those that are chosen by their experts need fewer; all together need the fewest a token."""
    costs = measure_groups(1)
    assert costs["experts"].distinct_experts_per_layer < costs["turns"].distinct_experts_per_layer
    assert costs["all"].experts_per_token < costs["experts"].experts_per_token


@pytest.mark.thorough
def test_bench_kv_gives_its_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every transport moves its blocks between two processes, and each number that is promised is there."""
    monkeypatch.setattr(kv_transports, "_PULL_BYTES", 2 << 20)
    monkeypatch.setattr(kv_transports, "_NUM_ROUNDS", 1)
    monkeypatch.setattr(kv_transports, "_SETUPS", kv_transports._SETUPS[:1])
    assert kv(["--only", "transports", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["grpc_gb_s"] > 0
    assert 0 < found["shm_over_memcpy"] == found["shm_gb_s"] / found["memcpy_gb_s"]
    assert {"memcpy", "shm", "grpc"} <= {row["transport"] for row in found["transports"]}
