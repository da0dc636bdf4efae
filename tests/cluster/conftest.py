"""Clusters that several tests share; each test leaves them as it found them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.cluster.support import Cluster, running_cluster


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def fake_cluster(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path
) -> AsyncIterator[Cluster]:
    """One prefill and one decode worker with the fake runner; every prompt is handed over."""
    tmp_dir = tmp_path_factory.mktemp("fake-cluster")
    debug = {"log_level": "debug"}
    async with running_cluster(
        tmp_dir,
        tiny_tokenizer_dir,
        sections={"router": debug, "prefill": debug, "decode": debug},
        runner="fake",
        disaggregate="always",
    ) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def idle_fake_cluster(fake_cluster: Cluster) -> AsyncIterator[Cluster]:
    """The shared cluster; after the test nothing of it is left in any pool."""
    yield fake_cluster
    await fake_cluster.until_idle()
