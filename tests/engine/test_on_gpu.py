"""The runner and the blocks on a GPU, where the machine has one; on CPUs see test_block_bytes.py, test_on_meta.py and kernels/triton/interpreted."""

import threading
from pathlib import Path

import pytest
import torch

from paceline.core.kv_layout import BlockId
from paceline.core.request import SamplingParams
from paceline.engine.block_bytes import DeviceBlocks
from paceline.engine.checked import load_checked
from paceline.engine.device import Device
from paceline.engine.gpu_start import can_capture, capture_decodes, measure
from paceline.engine.model_loader import LoadedModel
from paceline.engine.model_runner import ModelRunner, side_by_side
from paceline.engine.step import SampleTask, ScheduledSequence, SchedulerOutput
from tests.factories import GREEDY, make_id

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

GPU = Device(torch.device("cuda:0"))
BLOCK_SIZE, NUM_BLOCKS = 16, 40
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=3)


def step(loaded: LoadedModel, start: int, end: int) -> SchedulerOutput:
    """Three sequences, one of which draws."""
    return SchedulerOutput(
        tuple(
            ScheduledSequence(
                make_id(f"r{index}"),
                tuple((7 * index + 3 * i) % 480 for i in range(start, end)),
                start,
                side_by_side(index, 64, loaded.layout),
                (SampleTask(params),),
            )
            for index, params in enumerate((GREEDY, DRAWN, GREEDY))
        ),
        (),
    )


def loaded_on(device: Device, directory: Path, attention: str = "auto") -> LoadedModel:
    """A tiny model in float32, checked against transformers there."""
    return load_checked(directory, "float32", BLOCK_SIZE, attention=attention, device=device)


def tokens(runner: ModelRunner, loaded: LoadedModel) -> list[tuple[int, ...]]:
    """Of a step of chunks, and of several of decodes."""
    lengths = [(0, 30), *((end - 1, end) for end in range(31, 36))]
    return [runner.execute(step(loaded, *each)).token_ids for each in lengths]


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_a_gpu_gives_the_tokens_that_a_cpu_gives(tiny_model_dir: Path, attention: str) -> None:
    """Greedy and drawn; the model's logits stand far apart."""
    ours, host = (
        loaded_on(device, tiny_model_dir, attention) for device in (GPU, Device(torch.device("cpu")))
    )
    found, expected = (
        tokens(ModelRunner(each.model, each.layout, NUM_BLOCKS), each) for each in (ours, host)
    )
    assert found == expected


def test_graphs_give_the_tokens_that_calls_give(tiny_model_dir: Path) -> None:
    """Captured at start, and done again for each step."""
    loaded = loaded_on(GPU, tiny_model_dir)
    runner = ModelRunner(loaded.model, loaded.layout, NUM_BLOCKS, has_scratch=True)
    expected = tokens(runner, loaded)
    assert can_capture(loaded, runner)
    capture_decodes(loaded, runner, 4, 64)
    assert runner._graphs is not None
    assert tokens(runner, loaded) == expected


def test_what_a_step_takes_is_measured(tiny_model_dir: Path) -> None:
    """Less than there is, and weights among it."""
    memory = measure(loaded_on(GPU, tiny_model_dir), 64, 8)
    assert 0 < memory.own_bytes < memory.total_bytes
    assert 0 < memory.for_kv(0.9, 1) < memory.total_bytes


def test_blocks_come_and_go_while_the_gpu_computes() -> None:
    """Another thread writes and reads its own, and none of its bytes is another's."""
    blocks = DeviceBlocks(GPU, 8, 1 << 20)
    wrong: list[int] = []

    def hand_over() -> None:
        """Of a block that nobody computes with."""
        for turn in range(50):
            blocks.write(BlockId(7), 0, bytes([turn]) * (1 << 20))
            if bytes(blocks.read(BlockId(7))) != bytes([turn]) * (1 << 20):
                wrong.append(turn)

    thread = threading.Thread(target=hand_over)
    thread.start()
    busy = torch.randn(2048, 2048, device=GPU.place)
    for _ in range(200):
        busy = busy @ busy
        busy /= busy.norm()
        saved = blocks.save(BlockId(0))
        blocks.restore(saved, BlockId(1))
    thread.join()
    GPU.finish()
    assert wrong == []
