"""The metrics of a cluster's processes, as numbers."""

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.support import Cluster

# A sample's name without "paceline_", and its labels.
Series = tuple[str, frozenset[tuple[str, str]]]


def series(name: str, **labels: str) -> Series:
    """What a value is looked up by."""
    return f"paceline_{name}", frozenset(labels.items())


class Scrape(dict[Series, float]):
    """All values of one process at one moment."""

    def __missing__(self, key: Series) -> float:
        """What has not happened yet has no series."""
        return 0.0

    def names(self) -> set[str]:
        """The metrics that are there."""
        return {name for name, _ in self}


async def scrape(cluster: Cluster, process: str) -> Scrape:
    """What a process says of itself now."""
    address = cluster.local.metrics_addresses[process]

    def get() -> str:
        """The page."""
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
            return str(answer.read().decode())

    families = text_string_to_metric_families(await asyncio.to_thread(get))
    samples = [sample for family in families for sample in family.samples]
    return Scrape({(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples})


def moved(before: Scrape, after: Scrape, name: str, **labels: str) -> float:
    """By how much a value has grown."""
    return after[series(name, **labels)] - before[series(name, **labels)]
