"""`./run bench quantization`: its numbers are what they are called."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.quantization import FEW, WORKS


def test_it_prints_a_table_and_writes_its_keys(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row for each kind of weights; plain ones agree with themselves, and the fewer bits the less others do."""
    file = tmp_path / "numbers.json"
    sizes = ["--max-tokens", "120", "--prompts", "2", "--new-tokens", "8", "--turns", "1", "--threads", "1"]
    argv = ["quantization", "--model", str(tiny_model_dir), "--dtype", "float32", *sizes, "--json", str(file)]
    assert main(argv) == 0
    printed, numbers = capsys.readouterr().out, json.loads(file.read_text())
    rows = {row["name"]: row for row in numbers["rows"]}
    assert all(name in printed for name in rows)
    plain = rows["none"]["accuracy"]
    assert plain["greedy_agreement"] == plain["greedy_until_first"] == 1.0
    assert set(rows["none"]["speedup"].values()) == {1.0}
    assert numbers["w4a16_greedy_agreement"] <= numbers["w8a8_greedy_agreement"]
    for name in FEW:
        assert 0.5 < numbers[f"{name}_ppl_ratio"] < 2
        assert all(numbers[f"{name}_{work.name}_speedup"] > 0 for work in WORKS)
