"""Whole engines on the kernels: the same tokens as with torch's attention, and decode steps in fixed shapes."""

from pathlib import Path

import pytest
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.core.request import SamplingParams, SequenceSpec
from paceline.engine.block_pool import BlockPool
from paceline.engine.checked import load_checked
from paceline.engine.conformance.architectures import build_tiny
from paceline.engine.decode_graphs import Pass, without_graph
from paceline.engine.engine import Engine
from paceline.engine.events import NewTokens
from paceline.engine.kernels.triton.sampling import choose_tokens
from paceline.engine.model_loader import LoadedModel, use_paged_attention
from paceline.engine.model_runner import ModelRunner
from paceline.engine.padding import decode_shapes
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.sequence import SequenceRole
from paceline.engine.triton_attention import TRITON_NAME
from paceline.worker.config import WorkerConfig
from paceline.worker.events import EventQueue
from paceline.worker.runner import load_runner
from paceline.worker.worker import open_worker
from tests.factories import make_id
from tests.tiny_model import write_tiny_model

NUM_BLOCKS, BLOCK_SIZE, MAX_TOKENS = 40, 16, 6
LENGTHS = (5, 30, 20)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, whose logits stand far apart."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def specs() -> list[SequenceSpec]:
    """Greedy ones and one that draws with every filter, of which one has two candidates."""
    drawing = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=3)
    sampling = (SamplingParams(temperature=0.0), drawing, SamplingParams(temperature=1.0, seed=4))
    return [
        SequenceSpec(
            sequence_id=make_id(f"r{index}"),
            prompt_ids=tuple((11 * index + 7 * i) % 64 for i in range(length)),
            sampling=params,
            max_tokens=MAX_TOKENS,
            candidates=(0, 1) if index == 2 else (0,),
            ignore_eos=True,
        )
        for index, (length, params) in enumerate(zip(LENGTHS, sampling, strict=True))
    ]


def answers(runner: ModelRunner) -> dict[tuple[str, int], list[int]]:
    """The tokens of each candidate."""
    layout = runner.memory.layout
    pool = BlockPool(NUM_BLOCKS, layout.block_size, layout.groups)
    engine = Engine(Scheduler(SchedulerConfig(64, max_num_seqs=8), pool, runner.memory), runner)
    for spec in specs():
        engine.add(spec, SequenceRole.GENERATE)
    found: dict[tuple[str, int], list[int]] = {}
    while engine.has_work():
        for event in engine.step().events:
            if isinstance(event, NewTokens):
                tokens = found.setdefault((event.sequence_id.request_id, event.candidate), [])
                tokens += event.token_ids
    engine.check_invariants()
    return found


def runner_of(loaded: LoadedModel, *, has_scratch: bool = False) -> ModelRunner:
    """With an empty cache."""
    return ModelRunner(loaded.model, loaded.layout, NUM_BLOCKS, has_scratch=has_scratch)


def test_kernels_give_the_same_tokens_as_torch(directory: Path) -> None:
    """Chunks, decodes and candidates, greedy and drawn; and so do decode steps that are padded and computed in fixed shapes."""
    expected = answers(runner_of(load_checked(directory, "float32", BLOCK_SIZE, attention="torch")))
    loaded = load_checked(directory, "float32", BLOCK_SIZE, attention="triton")
    calling = runner_of(loaded)
    # As on a GPU, where the runner finds it by itself.
    calling._choose = choose_tokens
    assert answers(calling) == expected

    fixed, num_passes = runner_of(loaded, has_scratch=True), 0

    def counted(compute: Pass) -> Pass:
        """A pass that is computed again."""

        def again() -> Tensor:
            """And counted."""
            nonlocal num_passes
            num_passes += 1
            return compute()

        return without_graph(again)

    fixed.capture_decodes(decode_shapes(4, 64), counted)
    assert answers(fixed) == expected
    assert num_passes >= MAX_TOKENS - 1


def test_windows_are_right_in_fixed_shapes() -> None:
    """Two KV groups, one of which lets its blocks go: the same tokens as call by call with torch's attention."""
    model = build_tiny("gemma2")
    layout = use_paged_attention(model, "float32", 4)
    expected = answers(ModelRunner(model, layout, NUM_BLOCKS))
    model.set_attn_implementation(TRITON_NAME)
    fixed = ModelRunner(model, layout, NUM_BLOCKS, has_scratch=True)
    fixed.capture_decodes(decode_shapes(4, 64), without_graph)
    assert answers(fixed) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_kernels_store_and_read_8_bits_as_torch_does(directory: Path, kv_dtype: str) -> None:
    """In chunks and decodes."""
    expected, found = (
        answers(
            runner_of(load_checked(directory, "float32", BLOCK_SIZE, kv_dtype=kv_dtype, attention=attention))
        )
        for attention in ("torch", "triton")
    )
    assert found == expected


async def test_a_whole_worker_computes_with_the_kernels(directory: Path) -> None:
    """Loaded, checked and opened by its settings alone, it gives the tokens that it gives with torch's attention."""
    found = []
    for attention in ("torch", "triton"):
        config = WorkerConfig(
            model=str(directory),
            device="cpu",
            dtype="float32",
            attention=attention,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            threads=1,
        )
        async with open_worker(config, load_runner(config)) as worker:
            events = EventQueue()
            worker.engine.submit(specs()[0], SequenceRole.GENERATE, events.put)
            tokens: list[int] = []
            while len(tokens) < MAX_TOKENS:
                event = await anext(events)
                tokens += event.token_ids if isinstance(event, NewTokens) else ()
        found.append(tokens)
    assert found[0] == found[1]


def test_numbers_that_the_interpreter_computes_wrongly_are_refused(directory: Path) -> None:
    """Rather than served."""
    with pytest.raises(ConfigError, match="wrong in bfloat16"):
        load_checked(directory, "bfloat16", BLOCK_SIZE, attention="triton")
