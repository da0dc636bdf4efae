"""Plans: the fewest workers, and the settings, with which a trace is served as promised."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.simulator.cluster import simulate
from benchmarks.simulator.cost import CostModel
from benchmarks.simulator.report import Report, report
from benchmarks.simulator.slo import Slo
from benchmarks.simulator.spec import ClusterSpec
from benchmarks.simulator.trace import Trace
from paceline.core.errors import ConfigError
from paceline.launcher.config import Topology

BUDGETS = (128, 256, 512, 1024)
BLOCK_SIZES = (8, 16, 32)
WATERMARKS = (0.0, 0.1, 0.2, 0.25)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """One cluster, and how it did."""

    cluster: ClusterSpec
    report: Report
    meets: bool

    @property
    def merit(self) -> tuple[bool, float, float]:
        """Larger is better, among clusters of equally many workers: the promise kept, goodput, then short waits."""
        return self.meets, self.report.goodput or 0.0, -self.report.ttft_s.p95

    @property
    def num_workers(self) -> int:
        """Of both tiers."""
        return self.cluster.topology.num_workers


def topologies(num_workers: int) -> list[Topology]:
    """Every way to split so many workers into two tiers; somebody must decode."""
    return [Topology(num_prefill, num_workers - num_prefill) for num_prefill in range(num_workers)]


class Search:
    """Adds workers until the promise is kept. `trials` has everything that was tried, in order."""

    def __init__(
        self, trace: Trace, base: ClusterSpec, cost: CostModel, slo: Slo, progress: Progress
    ) -> None:
        self.trials: list[Trial] = []
        self._trace = trace
        self._base = base
        self._cost = cost
        self._slo = slo
        self._progress = progress

    def run(self, max_workers: int) -> Trial | None:
        """The winner: the fewest workers, then the best goodput; None when nobody keeps the promise."""
        for num_workers in range(1, max_workers + 1):
            shapes = [shape for shape in topologies(num_workers) if self._may_be(shape)]
            best = max((trial for shape in shapes for trial in self.budgets(shape)), key=_merit, default=None)
            if best is None:
                continue
            best = max([best, *self.refined(best)], key=_merit)
            if best.meets:
                return best
        if not self.trials:
            way = f"--disaggregate {self._base.disaggregate}"
            raise ConfigError(f"--max-workers {max_workers} is too few: with {way} there is nothing to try")
        return None

    def tuned(self, topology: Topology) -> Trial:
        """The best settings for one shape."""
        best = max(self.budgets(topology), key=_merit)
        return max([best, *self.refined(best)], key=_merit)

    def budgets(self, topology: Topology) -> Iterator[Trial]:
        """One shape with each token budget, other settings as they were given."""
        for budget in BUDGETS:
            cluster = replace(self._base, topology=topology).with_scheduler(max_num_batched_tokens=budget)
            yield self._try(cluster)

    def refined(self, best: Trial) -> Iterator[Trial]:
        """The best shape and budget with other block sizes, then with other watermarks."""
        tried = best.cluster
        for block_size in BLOCK_SIZES:
            if block_size != tried.block_size:
                trial = self._try(replace(tried, block_size=block_size))
                best = max(best, trial, key=_merit)
                yield trial
        for watermark in WATERMARKS:
            if watermark != best.cluster.decode.watermark:
                yield self._try(best.cluster.with_scheduler(watermark=watermark))

    def _may_be(self, topology: Topology) -> bool:
        return topology.num_prefill > 0 or self._base.disaggregate != "always"

    def _try(self, cluster: ClusterSpec) -> Trial:
        numbers = report(simulate(self._trace, cluster, self._cost), self._slo)
        trial = Trial(cluster, numbers, numbers.meets(self._slo))
        self.trials.append(trial)
        self._progress(f"{len(self.trials):3d}  {row(trial)}")
        return trial


def _merit(trial: Trial) -> tuple[bool, float, float]:
    return trial.merit


HEAD = f"{'shape':<8}{'budget':>7}{'block':>6}{'watermark':>10}{'TTFT p95':>11}{'ITL p95':>11}{'goodput':>9}{'in SLO':>8}{'preempted':>10}"


def row(trial: Trial) -> str:
    """For people, under HEAD."""
    cluster, numbers = trial.cluster, trial.report
    return (
        f"{cluster.topology!s:<8}{cluster.decode.max_num_batched_tokens:>7}{cluster.block_size:>6}"
        f"{cluster.decode.watermark:>10.0%}"
        f"{numbers.ttft_s.p95 * 1e3:>8.0f} ms{numbers.itl_s.p95 * 1e3:>8.1f} ms"
        f"{numbers.goodput or 0:>7.2f}/s{numbers.slo_share or 0:>8.1%}{numbers.preempted_request_share:>10.1%}"
        f"{'  meets' if trial.meets else ''}"
    )


def grid_table(trials: Sequence[Trial]) -> str:
    """All that was tried."""
    return "\n".join([HEAD, *map(row, trials)])


def verdict(winner: Trial | None, trials: Sequence[Trial], slo: Slo) -> str:
    """The answer in words."""
    if winner is None:
        best, most = max(trials, key=_merit), max(trial.num_workers for trial in trials)
        return (
            f"no cluster of up to {most} workers keeps {slo} at p95; the best serves "
            f"{best.report.slo_share or 0:.1%} of the requests within it: {_settings(best)}"
        )
    return (
        f"{slo} at p95 needs {winner.num_workers} worker{'s' * (winner.num_workers > 1)}: {_settings(winner)}"
    )


def _settings(trial: Trial) -> str:
    return ", ".join(f"{name} = {value}" for name, value in trial.cluster.as_json().items())
