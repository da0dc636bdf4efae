"""`./run bench serve`: what is asked for, of whom, and what the figures say."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest

from benchmarks.serve import command
from benchmarks.serve.drive import Life, drive
from benchmarks.serve.figures import figures, medians, ratios, table
from benchmarks.serve.memory import resident_bytes
from benchmarks.serve.servers import Server
from benchmarks.serve.targets import RefusedError
from benchmarks.serve.workloads import WORKLOADS, Asked, Conversation, Turn, Workload, chosen, traced
from benchmarks.simulator.readers import load_trace
from benchmarks.simulator.records import RequestRecord
from benchmarks.simulator.slo import Slo
from benchmarks.simulator.trace import TraceRequest
from paceline.core.errors import ConfigError

# -- what is asked for


def test_workloads_are_as_described() -> None:
    """Numbers and lengths are those that their descriptions name."""
    asked = Asked(run=1, vocab_size=100)
    mixed = chosen(["mixed"], asked)
    assert [(each.key, each.concurrency, each.num_turns) for each in mixed] == [
        ("mixed_1", 1, 64),
        ("mixed_8", 8, 64),
        ("mixed_32", 32, 64),
    ]
    turns = [turn for workload in mixed for each in workload.conversations for turn in each.turns]
    assert all(
        16 <= len(turn.new_ids) <= 256 and 16 <= turn.num_output_tokens <= 256 and max(turn.new_ids) < 100
        for turn in turns
    )
    (interference,) = chosen(["interference"], asked)
    assert [each.group for each in interference.conversations] == ["steady"] * 8 + ["long"] * 6
    assert [each.start_s for each in interference.conversations[8:]] == [1.5, 3.0, 4.5, 6.0, 7.5, 9.0]
    assert all(3000 <= len(each.turns[0].new_ids) <= 3800 for each in interference.conversations[8:])
    (shared,) = chosen(["shared-prefix"], asked)
    prompts = {each.turns[0].new_ids for each in shared.conversations}
    assert len(prompts) == 32 and len({prompt[:1000] for prompt in prompts}) == 1
    (chat,) = chosen(["chat"], asked)
    assert {len(each.turns) for each in chat.conversations} == {10}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_run_finds_nothing_of_another(name: str) -> None:
    """All but the prompts' tokens is the same: no cache that one run has filled helps the next."""
    first, again, other = (chosen([name], Asked(run, 1000)) for run in (1, 1, 2))
    assert first == again
    for ours, theirs in zip(first, other, strict=True):
        for here, there in zip(ours.conversations, theirs.conversations, strict=True):
            assert (here.start_s, here.group) == (there.start_s, there.group)
            assert here.turns[0].new_ids[:8] != there.turns[0].new_ids[:8]


def test_a_trace_is_replayed_as_it_came() -> None:
    """Arrivals, lengths and shared beginnings."""
    trace = load_trace("zipf:requests=20,rate=2,prompt=30,output=5,system=16,prefixes=2,seed=1")
    workload = traced(trace, Asked(1, 1000))
    assert [each.start_s for each in workload.conversations] == [each.arrival_s for each in trace.requests]
    assert workload.concurrency is None
    begins = {each.turns[0].new_ids[:16] for each in workload.conversations}
    assert len(begins) == 2


# -- asking


class Scripted:
    """Answers in two parts, with tokens that count up from the prompt's last one.

    Refuses a prompt that ends in 13, gives a token too few after 14, and one too many after 15.
    """

    name = "scripted"

    def __init__(self, *, knows_ids: bool = True) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.num_open = self.most_open = 0
        self._knows_ids = knows_ids

    async def answer(
        self, prompt_ids: Sequence[int], num_output_tokens: int
    ) -> AsyncGenerator[tuple[int, ...], None]:
        """See Target.answer."""
        self.prompts.append(tuple(prompt_ids))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await asyncio.sleep(0)
            if prompt_ids[-1] == 13:
                raise RefusedError("13 is not taken")
            first = prompt_ids[-1] + 1 if self._knows_ids else -num_output_tokens
            yield (first,)
            await asyncio.sleep(0)
            wrong_by = {14: -1, 15: 1}.get(prompt_ids[-1], 0)
            yield tuple(range(first + 1, first + num_output_tokens + wrong_by))
        finally:
            self.num_open -= 1


def single(*new_ids: int) -> Conversation:
    """One turn with three tokens of answer."""
    return Conversation((Turn(new_ids, 3),))


async def test_no_more_are_under_way_than_the_workload_says() -> None:
    """And all of them come to their turn."""
    target = Scripted()
    lives = await drive(Workload("some", tuple(single(n, 20) for n in range(10)), concurrency=4), target)
    assert target.most_open == 4
    assert len(lives) == 10 and all(life.record.is_finished for life in lives)


async def test_a_turn_follows_all_that_was_said() -> None:
    """Its prompt is the last prompt, the answer to it, and what is new."""
    target = Scripted()
    talk = Conversation((Turn((1, 2), 3), Turn((7,), 3), Turn((9,), 2)))
    await drive(Workload("chat", (talk,), concurrency=1), target)
    assert target.prompts == [(1, 2), (1, 2, 3, 4, 5, 7), (1, 2, 3, 4, 5, 7, 8, 9, 10, 9)]


async def test_a_turn_that_fails_ends_its_conversation_only() -> None:
    """Its life says why; what came before it stays, and so do the others."""
    target = Scripted()
    talk = Conversation((Turn((1,), 3), Turn((13,), 3), Turn((9,), 3)))
    lives = await drive(Workload("chat", (talk, single(5), single(14)), concurrency=1), target)
    assert [life.record.is_finished for life in lives] == [True, False, True, False]
    assert [life.record.reason for life in lives] == ["", "13 is not taken", "", "2 tokens came"]


async def test_an_answer_that_is_too_long_ends_its_conversation_too() -> None:
    """What would follow is another conversation than the other servers have."""
    talk = Conversation((Turn((15,), 3), Turn((9,), 3)))
    lives = await drive(Workload("chat", (talk,), concurrency=1), Scripted())
    assert [life.record.reason for life in lives] == ["4 tokens came"]


async def test_a_server_that_hides_its_tokens_has_no_second_turns() -> None:
    """What would follow an unknown answer is no conversation, and that is said."""
    talk = Conversation((Turn((1,), 3), Turn((2,), 3)))
    for concurrency in (1, None):
        with pytest.raises(ConfigError, match="does not say its tokens' ids"):
            await drive(Workload("chat", (talk, talk), concurrency), Scripted(knows_ids=False))
    assert len(await drive(Workload("one", (single(1),), concurrency=1), Scripted(knows_ids=False))) == 1


# -- figures


def life(group: str, sent_s: float, *times_s: float, wanted: int | None = None) -> Life:
    """One request with tokens at these times."""
    request = TraceRequest(sent_s, 10, wanted or len(times_s))
    return Life(group, RequestRecord(0, request, "local", times_s))


def test_figures_are_those_of_the_groups_that_a_workload_has() -> None:
    """The long ones wait, the steady ones stream; both count for the rate."""
    lives = [
        life("steady", 0.0, 1.0, 1.5, 2.5),
        life("long", 1.0, 4.0, 9.0),
        life("steady", 0.0, 0.5, wanted=3),
    ]
    found = figures("some", lives, Slo(ttft_s=2.0, itl_s=1.0))
    assert found == {
        "some_output_tok_s": 6 / 9.0,
        "some_wall_s": 9.0,
        "some_ttft_p50_ms": 3000.0,
        "some_ttft_p95_ms": 3000.0,
        "some_ttft_p99_ms": 3000.0,
        "some_itl_p50_ms": 500.0,
        "some_itl_p99_ms": 1000.0,
        "some_itl_max_ms": 1000.0,
        "some_tpot_p50_ms": 750.0,
        "some_goodput_per_s": 1 / 9.0,
        "some_failed": 1.0,
    }


def test_nothing_that_finished_has_no_durations() -> None:
    """No key stands for a number that is not there, and medians leave it out."""
    nothing = figures("some", [life("all", 0.0, wanted=3)], None)
    assert nothing == {"some_output_tok_s": 0.0, "some_wall_s": 0.0, "some_failed": 1.0}
    some = figures("some", [life("all", 0.0, 1.0)], None)
    assert medians([nothing, some])["some_ttft_p50_ms"] == 1000.0


def test_a_failure_in_one_run_is_not_lost_among_the_others() -> None:
    """Of the failed all are told, whatever is in the middle."""
    runs = [figures("some", [life("all", 0.0, 1.0, wanted=wanted)], None) for wanted in (1, 1, 2)]
    assert medians(runs)["some_failed"] == 1.0


def test_the_table_shows_ours_over_theirs() -> None:
    """A key that the other has not has no ratio."""
    lines = table({"a": 3.0, "b": 1.0}, {"vllm": {"a": 2.0}}).splitlines()
    assert lines[1].split() == ["a", "3.00", "2.00", "1.500"]
    assert lines[2].split() == ["b", "1.00", "-"]


def test_a_ratio_has_two_numbers_that_measure_something() -> None:
    """None over nothing, and none of failures."""
    ours = {"a": 3.0, "b": 1.0, "c": 1.0, "x_failed": 1.0}
    assert ratios(ours, {"a": 2.0, "b": 0.0, "x_failed": 1.0}) == {"a": 1.5}


def test_memory_is_that_of_processes_that_are_there() -> None:
    """This one takes some; one that is gone takes none."""
    assert resident_bytes([os.getpid()]) > 1 << 20
    assert resident_bytes([2**22 + 1]) == 0


def test_a_server_that_is_not_there_is_said_at_once() -> None:
    """Not after every workload has been tried."""
    with pytest.raises(ConfigError, match=r"the server at 127\.0\.0\.1:1 does not answer"):
        command.main(["--address", "127.0.0.1:1"])


# -- the whole


@pytest.mark.parametrize(
    "argv",
    [
        ["--workloads", "mixd"],
        ["--workloads", ""],
        ["--concurrency", "0"],
        ["--rate", "0"],
        ["--repeats", "x"],
        ["--slo", "soon"],
    ],
)
def test_a_wrong_flag_is_a_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """And a status of 2."""
    with pytest.raises(SystemExit) as caught:
        command.main(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


async def test_a_workload_that_a_server_cannot_be_asked_for_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The others are measured all the same, with the memory of what was started here."""
    talk = Conversation((Turn((1,), 3), Turn((2,), 3)))
    server = Server(Scripted(knows_ids=False), lambda: [os.getpid()], {"start_to_first_answer_s": 2.0})
    found = command._Found()
    workloads = [Workload("chat", (talk,), 1), Workload("one", (single(1),), 1)]
    await command._take_turns(found, workloads, [server], None, "run 1 of 1")
    (numbers,) = found.runs["scripted"]
    assert numbers["start_to_first_answer_s"] == 2.0 and numbers["peak_rss_mb"] > 1
    assert numbers["one_failed"] == 0 and not any(key.startswith("chat") for key in numbers)
    assert "left out: scripted does not say its tokens' ids" in capsys.readouterr().err


def test_programs_get_ours_theirs_and_the_ratio() -> None:
    """Each under a key of its own."""
    numbers = command._numbers({"mixed_8_wall_s": 1.0}, {"vllm": {"mixed_8_wall_s": 4.0}})
    assert numbers == {"mixed_8_wall_s": 1.0, "vllm_mixed_8_wall_s": 4.0, "mixed_8_wall_s_over_vllm": 0.25}


@pytest.mark.thorough
def test_bench_serve_gives_its_keys(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A cluster is started, each workload passes, and every number that is promised is there."""
    argv = [
        "--runner",
        "fake",
        "--model",
        str(tiny_model_dir),
        "--repeats",
        "1",
        "--slo",
        "ttft=5s,itl=1s",
    ]
    argv += ["--workloads", "chat", "--trace", "poisson:requests=5,rate=50,prompt=9,output=4,seed=1"]
    file = tmp_path / "found.json"
    assert command.main([*argv, "--json", str(file), "--plots", str(tmp_path)]) == 0
    found = json.loads(file.read_text())
    for key in ("chat_4", "trace"):
        names = (
            "output_tok_s",
            "ttft_p50_ms",
            "ttft_p99_ms",
            "itl_p50_ms",
            "itl_p99_ms",
            "itl_max_ms",
            "goodput_per_s",
        )
        assert all(found[f"{key}_{name}"] >= 0 for name in names)
        assert found[f"{key}_failed"] == 0
        assert (tmp_path / f"{key}-paceline.svg").is_file()
    assert found["start_to_first_answer_s"] > 0 and found["peak_rss_mb"] > 0
