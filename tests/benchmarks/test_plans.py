"""Searches, sweeps and plots: what `./run simulate` answers beside one run."""

import json
from pathlib import Path

import pytest

from benchmarks.simulator.cli import main
from benchmarks.simulator.cluster import simulate
from benchmarks.simulator.cost import TEXTBOOK
from benchmarks.simulator.plots import LOADS, load_curve, plot_latencies, plot_load
from benchmarks.simulator.search import Search, topologies, verdict
from benchmarks.simulator.slo import Slo
from benchmarks.simulator.spec import ClusterSpec
from benchmarks.simulator.trace import Trace, TraceRequest
from benchmarks.simulator.traffic import made_up
from paceline.launcher.config import Topology

SLO = Slo(ttft_s=0.1, itl_s=0.02)
# Two prompts every 60 ms take 40 ms of a worker each: one worker falls behind, two do not.
TOY = Trace("toy", tuple(TraceRequest(0.06 * (index // 2), 150, 2) for index in range(40)))
SMALL = "poisson:requests=20,rate=5,prompt=50,output=6"


def search(slo: Slo, max_workers: int = 3) -> tuple[Search, str]:
    """A search for the toy trace, and its answer."""
    found = Search(TOY, ClusterSpec(), TEXTBOOK, slo, lambda _: None)
    winner = found.run(max_workers)
    return found, verdict(winner, found.trials, slo)


def test_every_split_into_tiers_is_tried() -> None:
    """Somebody must decode, and nobody has to prefill apart."""
    assert list(map(str, topologies(3))) == ["0P3D", "1P2D", "2P1D"]


def test_the_fewest_workers_win() -> None:
    """One worker does not keep the promise and two do, so that three are not tried; ties go by goodput."""
    found, answer = search(SLO)
    assert "needs 2 workers" in answer
    assert {trial.num_workers for trial in found.trials} == {1, 2}
    assert not any(trial.meets for trial in found.trials if trial.num_workers == 1)
    winner = max(found.trials, key=lambda trial: trial.merit)
    keeping = [trial for trial in found.trials if trial.meets]
    assert winner.report.goodput == max(trial.report.goodput or 0 for trial in keeping)
    settings = [json.dumps(trial.cluster.as_json()) for trial in found.trials]
    assert len(set(settings)) == len(settings), "nothing is tried twice"


def test_a_promise_that_nobody_keeps_is_said_to_be_one() -> None:
    """With the share of requests that the best cluster serves within it."""
    found, answer = search(Slo(ttft_s=0.001, itl_s=0.001), max_workers=2)
    assert answer.startswith("no cluster of up to 2 workers keeps")
    assert "0.0% of the requests" in answer
    assert {trial.num_workers for trial in found.trials} == {1, 2}


def test_a_load_curve_saturates() -> None:
    """What is served follows what arrives, up to what the cluster can do."""
    points = load_curve(TOY, ClusterSpec(), TEXTBOOK, SLO)
    assert [point.factor for point in points] == list(LOADS)
    assert points[0].served_per_s == pytest.approx(points[0].requests_per_s, rel=0.1)
    assert points[-1].served_per_s < points[-1].requests_per_s / 2
    assert all((point.goodput or 0) <= point.served_per_s + 1e-9 for point in points)


def test_curves_are_drawn(tmp_path: Path) -> None:
    """With and without a promise; what is written are pictures."""
    result = simulate(made_up(SMALL), ClusterSpec(Topology(1, 1)), TEXTBOOK)
    for slo in (SLO, None):
        plot_latencies(result, slo, tmp_path / "latencies.png")
        plot_load(load_curve(TOY, ClusterSpec(), TEXTBOOK, slo), slo, tmp_path / "load.png")
        for file in tmp_path.iterdir():
            assert file.read_bytes().startswith(b"\x89PNG")


def test_the_command_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints a table, and writes numbers and decisions."""
    files = ["--json", str(tmp_path / "n.json"), "--decisions", str(tmp_path / "d.txt")]
    assert main(["--trace", SMALL, "--topology", "1P1D", "--set", "decode.max_num_seqs=4", *files]) == 0
    assert "20 of 20 requests finished" in capsys.readouterr().out
    assert json.loads((tmp_path / "n.json").read_text())["num_finished"] == 20
    assert (tmp_path / "d.txt").read_text().startswith(("prefill-0 ", "decode-0 "))


def test_the_command_searches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The grid and the winner are printed; without one the exit status is 1."""
    file = tmp_path / "n.json"
    slo = ["--slo", "ttft=500ms,itl=50ms", "--search", "--json", str(file)]
    assert main(["--trace", SMALL, *slo]) == 0
    printed = capsys.readouterr()
    assert "needs 1 worker: topology = 0P1D" in printed.out
    assert "0P1D" in printed.err
    assert json.loads(file.read_text())["winner"]["topology"] == "0P1D"
    hopeless = ["--slo", "ttft=1ms,itl=1ms", "--search", "--max-workers", "1"]
    assert main(["--trace", SMALL, *hopeless]) == 1


def test_the_command_sweeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Block sizes and budgets, and the reason of each default."""
    file = tmp_path / "n.json"
    assert main(["--trace", SMALL, "--sweep", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "16 (default)" in printed and "512 (default)" in printed
    assert printed.count("The default is") == 2
    assert len(json.loads(file.read_text())["points"]) == 9


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--search"], "--search needs --slo"),
        (["--slo", "soon"], "not of the form"),
        (["--cost", "free"], "neither one of textbook, linear"),
        (["--set", "gears=3"], "no setting 'gears'"),
        (["--set", "router.max_num_seqs=1"], "'router' is no tier"),
        (["--set", "max_num_seqs=many"], "must be of type int"),
        (["--topology", "2P"], "not of the form xPyD"),
        (["--kv-memory", "1GiB"], "does not say how large a token is"),
        (["--block-size", "0"], "too few"),
        (["--kv-tokens", "1000000000000"], "too many"),
        (["--set", "aging_s=nan"], "--aging-s must be a number, not nan"),
        (["--set", "watermark_rise=inf"], "--watermark-rise must be a number, not inf"),
        (["--set", "watermark_rise=-1"], "watermark_rise must be at least 0"),
        (["--set", "num_swap_blocks=-1"], "num_swap_blocks must be at least 0"),
        (["--max-requests", "-1"], "--max-requests"),
        (["--set", "cool_down_window=1" + "0" * 20], "cool_down_window must be at most"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with status 2 and says what is wrong."""
    with pytest.raises(SystemExit) as raised:
        main(["--trace", SMALL, *flags])
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--slo ttft=1s,itl=1s --search --max-workers 0", "--max-workers 0 is too few"),
        (
            "--slo ttft=1s,itl=1s --search --max-workers 1 --disaggregate always",
            "--max-workers 1 is too few",
        ),
        ("--decisions no/such/directory/d.txt", "--decisions no/such/directory/d.txt: "),
        (f"--plot {__file__}/curves", "--plot "),
    ],
)
def test_what_turns_out_on_the_way_is_one_line_too(
    flags: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever was said before it, the last word is what is wrong."""
    with pytest.raises(SystemExit) as raised:
        main(["--trace", SMALL, *flags.split()])
    assert raised.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"./run simulate: error: {problem}")


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    """Formats and examples are in it."""
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "hash_ids" in shown and "--search" in shown
