"""`./run bench routing`, with short traces."""

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.routing import main, row_of_simulation
from benchmarks.simulator.cluster import simulate
from benchmarks.simulator.cost import TEXTBOOK
from benchmarks.simulator.spec import ClusterSpec
from benchmarks.simulator.traffic import made_up
from paceline.launcher.config import PLACEMENTS, Topology, UpConfig
from router.config import RouterConfig
from router.policies import POLICIES


def test_it_gives_its_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each policy on each trace: ratios are ratios, and whoever looks where prefixes lie hits more than who goes round."""
    file = tmp_path / "found.json"
    assert main(["--no-real", "--requests", "250", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    for prefix in ("", "chat_"):
        for policy in (name.replace("-", "_") for name in POLICIES):
            assert 0 < found[f"{prefix}{policy}_hit_ratio"] < 1
            assert 0 < found[f"{prefix}{policy}_ttft_p50_ms"] <= found[f"{prefix}{policy}_ttft_p95_ms"]
            assert 1 <= found[f"{prefix}{policy}_max_over_mean_load"] < 2
            assert found[f"{prefix}{policy}_finished_share"] == 1
        for aware in ("prefix_aware", "consistent_hash"):
            assert found[f"{prefix}{aware}_hit_ratio"] > found[f"{prefix}round_robin_hit_ratio"]
        assert found[f"{prefix}prefix_aware_ttft_p50_ms"] < found[f"{prefix}round_robin_ttft_p50_ms"]
    assert "consistent-hash" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_real_cluster_gives_its_keys_too(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Each policy starts four workers and a router, and every request gets its tokens."""
    file, model = tmp_path / "found.json", ["--model", str(tiny_tokenizer_dir)]
    assert main(["--requests", "20", "--real-requests", "12", *model, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    for policy in (name.replace("-", "_") for name in POLICIES):
        assert found[f"real_{policy}_finished_share"] == 1
        assert 0 < found[f"real_{policy}_ttft_p50_ms"] <= found[f"real_{policy}_ttft_p95_ms"]
        assert 1 <= found[f"real_{policy}_max_over_mean_load"] <= 2


def test_load_is_compared_within_a_tier() -> None:
    """Tiers do different work: the spread is that of the less even one, and a tier of one is even."""
    trace = made_up("zipf:requests=60,rate=30,system=64,prefixes=4,seed=1")
    assert row_of_simulation(simulate(trace, ClusterSpec(Topology(1, 1)), TEXTBOOK)).max_over_mean_load == 1
    turns = ClusterSpec(Topology(2, 2), disaggregate="always", placement="round-robin")
    assert 1 <= row_of_simulation(simulate(trace, turns, TEXTBOOK)).max_over_mean_load < 2


def test_a_few_beginnings_of_zipf_traffic_are_popular() -> None:
    """The k-th is asked for about 1/k as often as the first."""
    trace = made_up("zipf:requests=3000,system=32,prefixes=8,seed=2")
    counts = Counter(request.prefix[0].name for request in trace.requests)
    assert [name for name, _ in counts.most_common(2)] == ["prefix 1", "prefix 2"]
    assert counts["prefix 1"] / counts["prefix 4"] == pytest.approx(4, rel=0.25)
    assert all(request.prefix[0].num_tokens == 32 < request.num_prompt_tokens for request in trace.requests)


def test_all_who_name_policies_name_the_same() -> None:
    """The launcher imports no service, and says again which there are."""
    assert tuple(POLICIES) == PLACEMENTS
    assert (
        UpConfig().placement == RouterConfig(model="m", decode="unix:d").placement == ClusterSpec().placement
    )
