"""Random histories of a scheduler under constant pressure: whatever happens, the tokens are the oracle's."""

import random
from collections import Counter
from collections.abc import Sequence as AbstractSequence

import pytest

from paceline.core.block_hash import BlockHash, hash_block
from paceline.core.errors import DeadlineError, PacelineError, QueueFullError
from paceline.core.kv_layout import WHOLE_VIEW, KVLayout, LayerKV, View
from paceline.core.request import (
    FinishReason,
    FirstToken,
    Priority,
    SamplingParams,
    SequenceId,
    SequenceSpec,
    TokenLogprob,
)
from paceline.engine.events import BlocksReady, Failed, NewTokens, PromptScored, Recall, Reserved, Started
from paceline.engine.fake import fake_prompt_logprobs
from paceline.engine.policies import TURN_POLICIES, VICTIM_POLICIES
from paceline.engine.sequence import SequenceRole
from tests.engine.harness import VOCAB_SIZE, Bench, HashBlock, oracle
from tests.factories import BLOCK_SIZE, GREEDY, make_id, make_spec

ROLES = (SequenceRole.GENERATE, SequenceRole.GENERATE, SequenceRole.PREFILL_ONLY, SequenceRole.AWAIT_KV)


def _hash_of_8_bits(parent: BlockHash, token_ids: AbstractSequence[int]) -> BlockHash:
    return BlockHash(hash_block(parent, token_ids)[:1])


# Layers by what they see: all of it, as in Gemma 3, as in Mistral, two windows of which one is a token, and sinks.
LAYERS = {
    "whole": (WHOLE_VIEW,),
    "some windows": (WHOLE_VIEW, View(6), View(6)),
    "a window": (View(7),),
    "two windows": (View(10), View(1)),
    "sinks": (View(5, num_sink_tokens=2), View(9, num_sink_tokens=7), View(1, num_sink_tokens=1)),
}


def _random_policies(rng: random.Random) -> dict[str, object]:
    """Every policy, and limits so tight that they matter."""
    return {
        "policy": rng.choice(list(TURN_POLICIES)),
        "victim": rng.choice(list(VICTIM_POLICIES)),
        "batching": rng.choice(("continuous", "continuous", "static")),
        "fast_lane_share": rng.choice((0.0, 0.3)),
        "fast_lane_prompt_tokens": 8,
        "fast_lane_output_tokens": 12,
        "cool_down_after": rng.choice((1, 3)),
        "cool_down_steps": rng.choice((2, 16)),
        "max_decodes": rng.choice((0, 0, 2)),
        "group_by_experts": rng.random() < 0.5,
        "aging_s": rng.choice((0.05, 30.0)),
        "max_overtakes": rng.choice((0, 1, 64)),
        "overload_wait_s": rng.choice((0.05, 5.0)),
        "static_batch_size": rng.choice((1, 4)),
        "num_swap_blocks": rng.choice((0, 0, 6, 100)),
        "prefix_pull": rng.choice(("never", "auto", "always")),
    }


class History:
    """One scheduler and everybody who uses it: routers that add and cancel, receivers, readers of leases."""

    def __init__(
        self,
        seed: int,
        hash_block: HashBlock = hash_block,
        layers: str = "whole",
        *,
        is_handed_over: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        # Most come from elsewhere, and are pulled again whenever that is possible.
        self.roles = (*ROLES, *[SequenceRole.AWAIT_KV] * 6) if is_handed_over else ROLES
        recalls = (
            {"prefix_pull": self.rng.choice(("auto", "always")), "num_swap_blocks": 0}
            if is_handed_over
            else {}
        )
        kinds = (LayerKV(1, 1, 1, window, num_sink_tokens=sinks) for window, sinks in LAYERS[layers])
        layout = KVLayout(tuple(kinds), BLOCK_SIZE, "float32")
        self.groups = layout.groups
        max_step_tokens = self.rng.choice((1, 3, 7, 16, 64))
        # 8 to 64 for each group, small ones as often as large ones; but little where windows need little.
        num_blocks = int(8 ** self.rng.uniform(1, 2)) * len(self.groups)
        if all(group.is_windowed for group in self.groups):
            num_blocks = layout.num_blocks_for(num_blocks, max_step_tokens) + self.rng.randint(0, 8)
        self.bench = Bench(
            num_blocks,
            max_num_batched_tokens=max_step_tokens,
            max_num_seqs=self.rng.randint(1, 8),
            eos=self.rng.sample(range(VOCAB_SIZE), self.rng.choice((0, 4))),
            hash_block=hash_block,
            groups=self.groups,
            **(_random_policies(self.rng) | recalls),  # type: ignore[arg-type] # each has its field's type
        )
        if is_handed_over or self.rng.random() < 0.5:
            self.bench.scheduler.costs.remote_pull_s = self.bench.scheduler.costs.remote_block_s = 1e-9
        self.max_tokens = max(
            n
            for n in range(1, num_blocks * BLOCK_SIZE + 1)
            if layout.num_blocks_for(n, max_step_tokens) <= num_blocks
        )
        self.specs: dict[SequenceId, tuple[SequenceSpec, SequenceRole]] = {}
        self.live: set[SequenceId] = set()
        self.committed: set[SequenceId] = set()
        self.released: set[SequenceId] = set()
        # Candidates that were cancelled alone, or whose first token was their last and came from elsewhere.
        self.silenced: set[tuple[SequenceId, int]] = set()
        # Recalls that have been answered, or will not be, and loans that are out.
        self.answered: set[tuple[SequenceId, int, int]] = set()
        self.num_loans = 0
        self.loans: list[SequenceId] = []

    def run(self, num_steps: int) -> None:
        """Some steps of everything, then to the end."""
        for _ in range(num_steps):
            self._act()
            self._step()
        self._drain()
        self._check()

    # -- what the outside does

    def _act(self) -> None:
        rng = self.rng
        if len(self.live) < 12 and rng.random() < 0.5:
            self._add()
        if rng.random() < 0.5:
            self._commit_one()
        if self.live and rng.random() < 0.05:
            self._release(rng.choice(sorted(self.live)))
        if self.live and rng.random() < 0.1:
            self._cancel_one(rng.choice(sorted(self.live)))
        self._act_elsewhere()
        if rng.random() < 0.05:
            self.bench.clock.advance(1.0)

    def _act_elsewhere(self) -> None:
        """Receivers write and answer, readers come and go."""
        rng = self.rng
        if rng.random() < 0.3:
            self._release_one_held()
        if rng.random() < 0.5:
            self._answer_one()
        if rng.random() < 0.1:
            self._lend_one()
        if self.loans and rng.random() < 0.2:
            self._end_one_loan()
        if rng.random() < 0.3:
            self._write_rubbish()

    def _add(self) -> None:
        spec, role = self._random_spec(), self.rng.choice(self.roles)
        self.specs[spec.sequence_id] = spec, role
        # Whoever computes may have heard that another worker has a part of it, or more than there is.
        num_remote_tokens = self.rng.choice((0, 0, self.rng.randrange(60)))
        self.live.add(self.bench.add(spec, role, num_remote_tokens))

    def _random_spec(self) -> SequenceSpec:
        rng = self.rng
        # Two beginnings and three letters: prefixes are shared, and diverge in the middle of blocks.
        num_prompt = rng.randint(1, min(40, self.max_tokens // 2))
        num_shared, start = rng.randint(0, num_prompt), rng.choice((0, 10))
        shared = list(range(start, start + num_shared))
        prompt_ids = tuple(shared + [rng.randrange(3) for _ in range(num_prompt - num_shared)])
        spec = make_spec(
            f"r{len(self.specs)}",
            prompt_ids,
            max_tokens=rng.randint(1, min(40, self.max_tokens - num_prompt + 1)),
            sampling=GREEDY if rng.random() < 0.5 else SamplingParams(seed=rng.randrange(3)),
            stop_token_ids=(rng.randrange(VOCAB_SIZE),) if rng.random() < 0.2 else (),
            ignore_eos=rng.random() < 0.2,
            bypass_cache=rng.random() < 0.1,
            cache_scope=rng.choice(("", "", "tenant", "public:8:tenant", "public:8:other")),
            time_budget_s=rng.uniform(0.1, 5.0) if rng.random() < 0.1 else None,
            prompt_logprobs=rng.random() < 0.2,
            priority=rng.choice(list(Priority)),
            tenant=rng.choice(("", "a", "b")),
            candidates=tuple(sorted(rng.sample(range(8), rng.choice((1, 1, 2, 3, 6))))),
        )
        return self._as_later_attempt(spec) if rng.random() < 0.2 else spec

    def _as_later_attempt(self, spec: SequenceSpec) -> SequenceSpec:
        """The same, when an earlier attempt has given some of its tokens already."""
        candidate = spec.candidates[0]
        output = self._oracle(spec, candidate)[0]
        given = tuple(output[: self.rng.randrange(len(output))])
        name = spec.sequence_id.request_id
        return make_spec(
            name,
            spec.prompt_ids,
            attempt=1,
            output_ids=given,
            max_tokens=spec.max_tokens,
            sampling=spec.sampling,
            stop_token_ids=spec.stop_token_ids,
            ignore_eos=spec.ignore_eos,
            cache_scope=spec.cache_scope,
            prompt_logprobs=spec.prompt_logprobs,
            candidates=(candidate,),
        )

    def _oracle(self, spec: SequenceSpec, candidate: int) -> tuple[list[int], FinishReason]:
        return oracle(spec, eos=self.bench.eos, groups=self.groups, candidate=candidate)

    def _cancel_one(self, sequence_id: SequenceId) -> None:
        """A stop string has come in one candidate. While a receiver writes, that is for the commit to say."""
        spec, role = self.specs[sequence_id]
        left = [i for i in spec.candidates if (sequence_id, i) not in self.silenced]
        if role is SequenceRole.PREFILL_ONLY or sequence_id in self._parked():
            return
        candidate = self.rng.choice(left)
        self.bench.release(sequence_id, candidate)
        self.silenced.add((sequence_id, candidate))
        self._note_ends(sequence_id)

    def _commit_one(self) -> None:
        parked = self._parked()
        if not parked:
            return
        sequence_id = self.rng.choice(parked)
        spec = self.specs[sequence_id][0]
        first_tokens = []
        for candidate in spec.candidates:
            output, reason = self._oracle(spec, candidate)
            num_given = len(spec.output_ids)
            is_last = len(output) == num_given + 1
            if (sequence_id, candidate) in self.silenced or self.rng.random() < 0.05:
                self.silenced.add((sequence_id, candidate))
                continue
            if is_last:
                self.silenced.add((sequence_id, candidate))
            first_tokens.append(FirstToken(output[num_given], reason if is_last else None, None, candidate))
        self.bench.commit(spec, *first_tokens)
        self.committed.add(sequence_id)
        self._note_ends(sequence_id)

    def _parked(self) -> list[SequenceId]:
        reserved = [i for i in sorted(self.live) if self.bench.of(i, Reserved)]
        return [i for i in reserved if i not in self.committed]

    def _write_rubbish(self) -> None:
        """A receiver is at work: blocks that are reserved and not held hold anything."""
        for sequence_id in self._parked():
            reserved = self.bench.one(sequence_id, Reserved)
            for block_id in reserved.block_ids[reserved.num_held :]:
                self.bench.runner.memory.write(block_id, 0, self.rng.randbytes(8))
        for _, recall in self._recalled():
            for block_id in recall.block_ids[recall.num_held :]:
                self.bench.runner.memory.write(block_id, 0, self.rng.randbytes(8))

    def _recalled(self) -> list[tuple[tuple[SequenceId, int, int], Recall]]:
        """Those that wait for their prompt again; the place among a sequence's recalls tells one from another."""
        recalls = [
            ((recall.sequence_id, recall.candidate, place), recall)
            for sequence_id in sorted(self.live)
            for place, recall in enumerate(self.bench.of(sequence_id, Recall))
        ]
        return [
            (key, recall)
            for key, recall in recalls
            if key not in self.answered
            and any((recall.sequence_id, candidate) not in self.silenced for candidate in recall.candidates)
        ]

    def _answer_one(self) -> None:
        """All of it comes, or a part of it, or nothing."""
        recalled = self._recalled()
        if recalled:
            key, recall = self.rng.choice(recalled)
            self.answered.add(key)
            num_held, num_asked = recall.num_held, len(recall.block_ids)
            self.bench.resume(
                recall, self.rng.choice((num_held, self.rng.randint(num_held, num_asked), num_asked))
            )

    def _lend_one(self) -> None:
        """Somebody asks for a beginning of a prompt that has been here, or of another one."""
        if not self.specs:
            return
        spec = self.rng.choice(list(self.specs.values()))[0]
        token_ids = (*spec.prompt_ids, 0, 1, 2, 3)
        token_ids = token_ids[: len(token_ids) // BLOCK_SIZE * BLOCK_SIZE]
        self.num_loans += 1
        loan = make_spec(f"loan-{self.num_loans}", token_ids, max_tokens=1, cache_scope=spec.cache_scope)
        self.loans.append(self.bench.add(loan, SequenceRole.LEND))

    def _end_one_loan(self) -> None:
        loan = self.loans.pop(self.rng.randrange(len(self.loans)))
        if self.bench.of(loan, Started):
            self._check_leased_blocks(loan)
        self.bench.release(loan)

    def _release_one_held(self) -> None:
        held = [i for i in sorted(self.live) if self._is_held(i)]
        if held:
            sequence_id = self.rng.choice(held)
            self._check_leased_blocks(sequence_id)
            self._release(sequence_id)

    def _is_held(self, sequence_id: SequenceId) -> bool:
        is_prefill = self.specs[sequence_id][1] is SequenceRole.PREFILL_ONLY
        return is_prefill and bool(self.bench.of(sequence_id, NewTokens))

    def _release(self, sequence_id: SequenceId) -> None:
        self.bench.release(sequence_id)
        self.live.discard(sequence_id)
        self.released.add(sequence_id)

    # -- steps

    def _step(self) -> bool:
        output = self.bench.step()
        for sequence_id in list(self.live):
            spec, role = self.specs[sequence_id]
            failed = isinstance(self.bench.end(sequence_id, spec.candidates[0]), PacelineError)
            if role is not SequenceRole.PREFILL_ONLY:
                self._note_ends(sequence_id)
            elif failed:
                self._release(sequence_id)
        return bool(output.scheduled)

    def _note_ends(self, sequence_id: SequenceId) -> None:
        spec = self.specs[sequence_id][0]
        loud = [i for i in spec.candidates if (sequence_id, i) not in self.silenced]
        if all(self.bench.end(sequence_id, candidate) is not None for candidate in loud):
            self.live.remove(sequence_id)

    def _drain(self) -> None:
        """Nobody new comes, and receivers and readers do their part: all that is left must end."""
        num_idle = 0
        while self.loans:
            self._end_one_loan()
        while self.live:
            self._commit_one()
            self._answer_one()
            self._release_one_held()
            num_idle = 0 if self._step() else num_idle + 1
            # Where nothing is computed, a worker may wait a moment for leases.
            self.bench.clock.advance(0.1 if num_idle else 0.0)
            assert num_idle < 30, f"no progress: {self.bench.scheduler.stats()}"
            assert len(self.bench.outputs) < 20_000, "no end"
        # The deadlines of those that have ended may have passed: nobody has anything to say about them.
        assert not self._step()

    # -- what must hold

    def _check(self) -> None:
        assert self.bench.pool.num_available == self.bench.pool.num_blocks
        assert not self.bench.scheduler.has_work()
        for sequence_id, (spec, role) in self.specs.items():
            for candidate in spec.candidates:
                self._check_candidate(spec, role, candidate)
            said = {event.candidate for event in self.bench.of(sequence_id, NewTokens)}
            assert said <= set(spec.candidates)

    def _check_candidate(self, spec: SequenceSpec, role: SequenceRole, candidate: int) -> None:
        sequence_id = spec.sequence_id
        output, reason = self._oracle(spec, candidate)
        expected = output[len(spec.output_ids) :]
        if role is SequenceRole.PREFILL_ONLY:
            expected, reason_now = expected[:1], reason if len(expected) == 1 else None
        elif role is SequenceRole.AWAIT_KV:
            expected, reason_now = expected[1:], reason
        else:
            reason_now = reason
        tokens, end = self.bench.tokens(sequence_id, candidate), self.bench.end(sequence_id, candidate)
        self._check_scores(spec, role, is_whole=bool(tokens))
        assert tokens == expected[: len(tokens)]
        if isinstance(end, DeadlineError):
            assert spec.time_budget_s is not None
        elif isinstance(end, QueueFullError):
            assert (spec.priority, tokens) == (Priority.BATCH, [])
        elif (sequence_id not in self.released and (sequence_id, candidate) not in self.silenced) or end:
            assert (tokens, end) == (expected, reason_now)

    def _check_scores(self, spec: SequenceSpec, role: SequenceRole, *, is_whole: bool) -> None:
        """The prompt's entries, each once and in order; all of them before the first token."""
        expected: tuple[TokenLogprob, ...] = ()
        if spec.prompt_logprobs and role is not SequenceRole.AWAIT_KV:
            expected = fake_prompt_logprobs(spec.prompt_ids, 0, VOCAB_SIZE, self.groups)
        events = self.bench.of(spec.sequence_id, PromptScored)
        told = tuple(entry for event in events for entry in event.logprobs)
        assert told == (expected if is_whole else expected[: len(told)])
        assert [event.first_index for event in events] == [
            1 + sum(len(before.logprobs) for before in events[:number]) for number in range(len(events))
        ]

    def _check_leased_blocks(self, sequence_id: SequenceId) -> None:
        """What a reader of the lease would read is what was promised, block by block."""
        promised = [block for event in self.bench.of(sequence_id, BlocksReady) for block in event.blocks]
        assert len(promised) == self.bench.one(sequence_id, Started).num_blocks
        for block in promised:
            assert block.checksum == self.bench.runner.memory.checksum(block.block_id)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("seed", range(16))
def test_random_histories_give_the_oracle_s_tokens(seed: int, layers: str) -> None:
    """Adds, cancels, commits, releases and deadlines in any order: every sequence ends once, with the right tokens."""
    history = History(seed, layers=layers)
    history.run(120)
    assert history.bench.pool.stats().num_collisions == 0


def test_random_histories_of_a_decode_worker_recall_what_they_can() -> None:
    """Where most prompts come from elsewhere, many are recalled, wholly, in part or not at all, and the tokens are the oracle's."""
    recalls: list[Recall] = []
    for seed in range(25):
        history = History(seed, is_handed_over=True)
        history.run(120)
        recalls += [recall for i in history.specs for recall in history.bench.of(i, Recall)]
    assert len(recalls) > 10
    assert any(recall.num_held for recall in recalls)
    assert any(recall.candidate for recall in recalls)


@pytest.mark.thorough
@pytest.mark.parametrize("layers", LAYERS)
def test_random_histories_with_a_hash_of_8_bits_give_the_oracle_s_tokens(layers: str) -> None:
    """Blocks collide all the time, are counted, and give nobody another's tokens."""
    num_collisions = num_hits = 0
    for seed in range(15):
        history = History(seed, _hash_of_8_bits, layers)
        history.run(120)
        num_collisions += history.bench.pool.stats().num_collisions
        num_hits += history.bench.pool.stats().num_hits
    assert num_collisions > 50
    assert num_hits > 15


@pytest.mark.thorough
@pytest.mark.parametrize("layers", LAYERS)
def test_random_histories_take_every_way(layers: str) -> None:
    """The histories above are worth something: they preempt, hit, evict, expire, commit and cancel."""
    seen: Counter[str] = Counter()
    for seed in range(50):
        history = History(seed, layers=layers, is_handed_over=seed % 2 == 0)
        history.run(120)
        stats, pool = history.bench.scheduler.stats(), history.bench.pool.stats()
        seen.update(stats.preemptions)
        seen.update(hits=pool.num_hits, evicted=pool.num_evictions, refused=stats.num_batch_refused)
        ends = [history.bench.end(i, spec.candidates[0]) for i, (spec, _) in history.specs.items()]
        seen.update(late=sum(isinstance(end, DeadlineError) for end in ends))
        loans = [history.bench.events[make_id(f"loan-{n + 1}")] for n in range(history.num_loans)]
        seen.update(type(events[-1]).__name__ for events in loans if events)
        seen.update(recalled=sum(len(history.bench.of(i, Recall)) for i in history.specs))
    ways = ["recompute", "swap", "hits", "evicted", "refused", "late", Failed.__name__]
    if layers == "whole":
        ways += ["remote", "recalled", BlocksReady.__name__]
    assert min(seen[way] for way in ways) > 1, seen


@pytest.mark.slow
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_random_histories_give_the_oracle_s_tokens(seed: int, layers: str) -> None:
    """The same, longer and more often."""
    History(seed, layers=layers).run(400)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3000, 3100))
def test_many_random_histories_of_a_decode_worker_give_the_oracle_s_tokens(seed: int) -> None:
    """The same, where most prompts come from elsewhere and are recalled."""
    History(seed, is_handed_over=True).run(400)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2000, 2004))
def test_one_long_random_history_keeps_its_books(seed: int) -> None:
    """5,000 steps of one scheduler with hundreds of sequences, of which many are cancelled; checked after each step."""
    history = History(seed)
    history.run(5000)
    assert len(history.bench.outputs) >= 5000
    assert len(history.specs) > 300
    assert sum(history.bench.end(i) is None for i in history.released) > 50
    assert history.bench.pool.stats().num_evictions > 100


def test_recomputed_tokens_stay_a_small_share() -> None:
    """At 1.2 times the load that fits, preemption costs less than a fifth of all computed tokens, and all finish."""
    bench = Bench(num_blocks=30, max_num_seqs=8)
    specs = [make_spec(f"r{n}", tuple(range(n, n + 8)), max_tokens=11) for n in range(40)]
    for spec in specs:
        bench.add(spec)
    bench.run(max_steps=2000)
    needed = sum(len(spec.prompt_ids) + spec.max_tokens - 1 for spec in specs)
    computed = sum(sum(step.values()) for step in bench.computed())
    assert [bench.tokens(make_id(f"r{n}")) for n in range(40)] == [oracle(spec)[0] for spec in specs]
    assert bench.scheduler.stats().num_preemptions > 0
    assert computed < 1.2 * needed
