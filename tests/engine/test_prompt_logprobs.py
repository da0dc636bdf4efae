"""Which prompt tokens each step tells the log probability of, with the fake runner, whose answers depend on every position."""

import pytest

from paceline.core.request import FirstToken, SequenceId, SequenceSpec, TokenLogprob
from paceline.engine.events import NewTokens, Progress, PromptScored, Started
from paceline.engine.fake import fake_prompt_logprobs
from paceline.engine.sequence import SequenceRole
from tests.engine.harness import VOCAB_SIZE, Bench, oracle
from tests.factories import make_spec

PROMPT = tuple(range(20, 40))  # 5 blocks


def told(bench: Bench, sequence_id: SequenceId) -> tuple[TokenLogprob, ...]:
    """Every entry of a sequence; that they follow on each other from place 1 is checked."""
    entries: list[TokenLogprob] = []
    for event in bench.of(sequence_id, PromptScored):
        assert event.first_index == len(entries) + 1
        assert event.logprobs, "an event tells something"
        entries += event.logprobs
    return tuple(entries)


def expected(spec: SequenceSpec) -> tuple[TokenLogprob, ...]:
    """The oracle's entries."""
    return fake_prompt_logprobs(spec.prompt_ids, spec.num_top_logprobs or 0, VOCAB_SIZE)


@pytest.mark.parametrize("role", [SequenceRole.GENERATE, SequenceRole.PREFILL_ONLY])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 19, 20, 64])
def test_every_prompt_token_but_the_first_is_told_once(chunk: int, role: SequenceRole) -> None:
    """However the prompt is cut: a chunk's last token tells the first token of the next one."""
    bench, spec = Bench(max_num_batched_tokens=chunk), make_spec(prompt_ids=PROMPT, prompt_logprobs=True)
    sequence_id = bench.add(spec, role)
    bench.run()
    assert told(bench, sequence_id) == expected(spec)
    assert len(expected(spec)) == len(PROMPT) - 1
    assert bench.tokens(sequence_id) == oracle(spec)[0][: len(bench.tokens(sequence_id))]


def test_entries_come_after_the_start_and_before_the_first_token() -> None:
    """So that who relays them can tell the whole prompt before it tells the output."""
    bench = Bench(max_num_batched_tokens=8)
    sequence_id = bench.add(make_spec(prompt_ids=PROMPT, max_tokens=2, prompt_logprobs=True))
    bench.run()
    kinds = [type(event) for event in bench.events[sequence_id]]
    assert kinds == [Started, *[Progress, PromptScored] * 2, PromptScored, *[NewTokens] * 2]


def test_each_sequence_of_a_batch_has_its_own_entries() -> None:
    """With their own numbers of alternatives; a neighbour that asked for none has none."""
    bench = Bench(num_blocks=32, max_num_batched_tokens=9)
    specs = [
        make_spec("three", PROMPT, num_top_logprobs=3, prompt_logprobs=True),
        make_spec("silent", PROMPT[3:], num_top_logprobs=2),
        make_spec("none", PROMPT[::-1], num_top_logprobs=0, prompt_logprobs=True),
    ]
    for spec in specs:
        bench.add(spec)
    bench.run()
    assert [told(bench, spec.sequence_id) for spec in specs] == [expected(specs[0]), (), expected(specs[2])]
    assert all(len(entry.top) == 3 for entry in told(bench, specs[0].sequence_id))


def test_it_reads_no_cache_and_fills_it() -> None:
    """A cached token has no logits: the prompt is computed whole, and others find its blocks."""
    bench = Bench(max_num_batched_tokens=64)
    specs = [
        make_spec(f"r{n}", (*PROMPT, n), prompt_logprobs=asks) for n, asks in enumerate((True, True, False))
    ]
    for spec in specs:
        bench.add(spec)
        bench.run()
    assert [bench.one(spec.sequence_id, Started).num_cached_tokens for spec in specs] == [0, 0, len(PROMPT)]
    assert [told(bench, spec.sequence_id) for spec in specs] == [expected(specs[0]), expected(specs[1]), ()]


def test_a_prompt_preempted_midway_is_told_once() -> None:
    """Recomputed tokens are told no second time, and none is left out."""
    bench = Bench(num_blocks=7, max_num_batched_tokens=4)
    bench.add(make_spec("old", (1, 2, 3), max_tokens=12))
    bench.step()
    young = make_spec("young", PROMPT, prompt_logprobs=True)
    bench.add(young)
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    assert 0 < len(told(bench, young.sequence_id)) < len(PROMPT) - 1
    bench.run()
    assert told(bench, young.sequence_id) == expected(young)
    assert bench.tokens(young.sequence_id) == oracle(young)[0]


def test_a_prompt_that_has_been_told_may_be_found_in_the_cache() -> None:
    """A sequence that is preempted while it decodes takes back what is still cached, and tells nothing again."""
    bench = Bench(num_blocks=12, max_num_batched_tokens=64)
    specs = [make_spec(name, PROMPT, max_tokens=16, prompt_logprobs=True) for name in ("a", "b")]
    for spec in specs:
        bench.add(spec)
    bench.run()
    assert bench.scheduler.stats().num_preemptions > 0
    recomputed = [output for output in bench.outputs[1:] for item in output.scheduled if item.start == 0]
    assert not recomputed, "the prompt was computed again"
    for spec in specs:
        assert told(bench, spec.sequence_id) == expected(spec)
        assert bench.tokens(spec.sequence_id) == oracle(spec)[0]


def test_earlier_output_is_not_told() -> None:
    """What an earlier attempt generated is input now, but no part of the prompt."""
    whole = oracle(make_spec(prompt_ids=PROMPT))[0]
    spec = make_spec(prompt_ids=PROMPT, attempt=1, output_ids=tuple(whole[:5]), prompt_logprobs=True)
    bench = Bench(max_num_batched_tokens=7)
    sequence_id = bench.add(spec)
    bench.run()
    assert told(bench, sequence_id) == expected(spec)
    assert bench.tokens(sequence_id) == whole[5:]


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    """There is no token before it that could make it probable."""
    bench = Bench()
    sequence_id = bench.add(make_spec(prompt_ids=(7,), prompt_logprobs=True))
    bench.run()
    assert told(bench, sequence_id) == ()
    assert bench.tokens(sequence_id)


def test_a_prompt_that_comes_from_outside_is_told_elsewhere() -> None:
    """Whoever hands it over tells it; also when it is preempted here and computed after all."""
    bench = Bench(num_blocks=8, max_num_seqs=4)
    bench.add(make_spec("old", (1, 2, 3), max_tokens=20))
    bench.step()
    spec = make_spec("moved", PROMPT[:8], max_tokens=12, prompt_logprobs=True)
    moved = bench.add(spec, SequenceRole.AWAIT_KV)
    bench.step()
    bench.commit(spec, FirstToken(oracle(spec)[0][0]))
    bench.run()
    assert bench.scheduler.stats().num_preemptions > 0
    assert told(bench, moved) == ()
    assert bench.tokens(moved) == oracle(spec)[0][1:]
