"""`./run bench kv --only table`, with a small table."""

import json
from pathlib import Path

import pytest

from benchmarks.kv import main
from benchmarks.prefix_table import LENGTHS
from paceline.core.errors import ConfigError


def test_it_gives_its_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every number that is promised, out of a real server: times by length, and what an entry takes."""
    file = tmp_path / "found.json"
    assert main(["--only", "table", "--entries", "2000", "--lookups", "5", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    for length in LENGTHS:
        name = "1_block" if length == 1 else f"{length}_blocks"
        assert 0 < found[f"lookup_ms_p50_{name}"] <= found[f"lookup_ms_p95_{name}"]
        assert 0 <= found[f"lookup_share_in_budget_{name}"] <= 1
    assert 100 < found["bytes_per_entry"] < 1000
    assert found["num_entries"] == 2000
    assert found["publish_ms_p50_32_blocks"] > 0
    assert "prefix table: 2,000 entries" in capsys.readouterr().out


def test_less_than_one_prompt_is_refused() -> None:
    """A table that is too small to look anything up in is no measurement."""
    with pytest.raises(ConfigError, match="--entries"):
        main(["--only", "table", "--entries", "10"])
