"""The flags of `./run up`."""

from functools import partial
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.launcher import config as launcher_config
from paceline.launcher.config import Topology, UpConfig
from paceline.worker.config import WorkerConfig


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1P1D", (1, 1)), ("2p3d", (2, 3)), ("0P1D", (0, 1)), (" 10P12D ", (10, 12))],
)
def test_a_topology_is_two_numbers(text: str, expected: tuple[int, int]) -> None:
    """A topology written xPyD gives x prefill and y decode workers, in either case."""
    topology = Topology.parse(text)
    assert (topology.num_prefill, topology.num_decode) == expected
    assert Topology.parse(str(topology)) == topology


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not of the form"),
        ("1P", "not of the form"),
        ("1D1P", "not of the form"),
        ("-1P1D", "not of the form"),
        ("1P1D1P", "not of the form"),
        ("1.5P1D", "not of the form"),
        ("\u0661P1D", "not of the form"),
        ("1P0D", "somebody must decode"),
        ("0P0D", "somebody must decode"),
        ("64P1D", "more than 64"),
        ("9999P9999D", "more than 64"),
    ],
)
def test_a_topology_without_sense_is_refused(text: str, why: str) -> None:
    """What makes no cluster is refused with the reason."""
    with pytest.raises(ConfigError, match=why):
        Topology.parse(text)


def test_a_door_to_the_network_needs_tenants_or_a_word() -> None:
    """Refused before anything is started."""
    with pytest.raises(ConfigError, match="--allow-anonymous"):
        UpConfig(host="0.0.0.0")
    UpConfig(host="0.0.0.0", allow_anonymous=True)
    UpConfig(host="0.0.0.0", tenants="t.toml")


def test_always_disaggregating_needs_a_prefill_worker() -> None:
    """Settings that contradict each other are refused before anything starts."""
    with pytest.raises(ConfigError, match="needs a prefill worker"):
        UpConfig(topology="0P1D", disaggregate="always")
    assert UpConfig(topology="0P1D").shape.num_prefill == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 65536},
        {"port": -1},
        {"metrics_port": -2},
        {"metrics_port": 65534},
        {"threads": -1},
        {"grace_s": 0.0},
    ],
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    """A port, thread count or duration that cannot be is refused."""
    with pytest.raises(ConfigError):
        UpConfig(**wrong)  # type: ignore[arg-type] # the wrong value is the point


def test_half_of_tls_is_refused() -> None:
    """With the setting that is missing; certificates of clients open the network to them, TLS alone does not."""
    with pytest.raises(ConfigError, match="--tls-key is missing"):
        UpConfig(tls_cert="c")
    with pytest.raises(ConfigError, match="--tls-client-ca"):
        UpConfig(host="0.0.0.0", tls_cert="c", tls_key="k")
    UpConfig(host="0.0.0.0", tls_cert="c", tls_key="k", tls_client_ca="a")


@pytest.mark.parametrize(
    ("cores", "topology", "threads", "expected"),
    [(2, "1P1D", 0, 1), (16, "1P3D", 0, 4), (2, "4P4D", 0, 1), (8, "1P1D", 3, 3)],
)
def test_cores_are_shared_out(
    cores: int, topology: str, threads: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --threads the workers get equal shares of the cores, and at least one each."""
    monkeypatch.setattr(launcher_config, "usable_cores", lambda: cores)
    assert UpConfig(topology=topology, threads=threads).threads_per_worker == expected


@pytest.mark.parametrize(
    ("cores", "settings", "expected"),
    [
        (2, {}, True),
        (16, {"topology": "1P3D"}, True),
        (3, {"topology": "2P2D"}, False),
        (2, {"topology": "0P1D"}, False),
        (2, {"threads": 1}, False),
        (2, {"exactness": "exact"}, False),
        (2, {"runner": "fake"}, False),
        (2, {"lend_cores": False}, False),
    ],
)
def test_cores_are_lent_where_each_worker_has_its_own(
    cores: int, settings: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where bits could depend on it, nor where somebody has said how many threads there are to be."""
    monkeypatch.setattr(launcher_config, "usable_cores", lambda: cores)
    assert UpConfig(**settings).lends_cores is expected


@pytest.mark.parametrize(
    ("kv_memory", "topology", "expected"),
    [("6000B", "1P1D", 3000), ("3000B", "0P1D", 3000), ("50%", "2P3D", 1000), ("1B", "1P1D", 1)],
)
def test_kv_memory_is_shared_out(kv_memory: str, topology: str, expected: int) -> None:
    """The cluster's budget, in bytes or as a share of what is free, is split equally between the workers."""
    config = UpConfig(topology=topology, kv_memory=kv_memory)
    assert config.kv_bytes_per_worker(free_bytes=10_000, weights_bytes=100) == expected


@pytest.mark.parametrize(
    ("kv_memory", "weights_bytes"), [("10001B", 0), ("900GiB", 0), ("100%", 1), ("8001B", 1000)]
)
def test_a_cluster_that_takes_more_memory_than_there_is_is_refused(
    kv_memory: str, weights_bytes: int
) -> None:
    """All KV caches together, beside each worker's copy of the weights, must fit into what is free."""
    config = UpConfig(topology="1P1D", kv_memory=kv_memory)
    with pytest.raises(
        ConfigError, match=r"are more than the .* free beside the weights of 2 workers; lower it"
    ):
        config.kv_bytes_per_worker(free_bytes=10_000, weights_bytes=weights_bytes)


def test_a_length_without_room_for_an_output_is_refused() -> None:
    """One token is a prompt that nothing can follow; a worker says the same."""
    for config in (UpConfig, partial(WorkerConfig, model="m")):
        with pytest.raises(ConfigError, match="at least 2"):
            config(max_model_len=1)


@pytest.mark.parametrize(
    "wrong", ["", "4", "GiB", "4GB", "-1GiB", "0%", "101%", "0B", "1e3MiB", "9" * 400 + "B"]
)
def test_memory_without_sense_is_refused(wrong: str) -> None:
    """What is no amount of memory is refused before anything starts, and the setting is named."""
    with pytest.raises(ConfigError, match="--kv-memory"):
        UpConfig(kv_memory=wrong)
