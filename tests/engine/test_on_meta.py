"""A whole forward pass on a device that has shapes and no numbers, which is no host: nothing in it may stand elsewhere, or be looked at.

What waits for a number, or puts a tensor of the host beside others, raises here as it would fail while a GPU's graph is captured.
"""

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from paceline.core.kv_layout import KVLayout, min_blocks
from paceline.engine.conformance.architectures import build_tiny
from paceline.engine.decode_graphs import Pass, without_graph
from paceline.engine.device import Device
from paceline.engine.forward_batch import build_forward_batch, on_device
from paceline.engine.kernels.triton.launch import Launch
from paceline.engine.model_loader import use_paged_attention
from paceline.engine.model_runner import ModelRunner, side_by_side
from paceline.engine.padding import decode_shapes
from paceline.engine.step import SampleTask, ScheduledSequence, SchedulerOutput
from paceline.engine.triton_attention import TRITON_NAME
from tests.factories import BLOCK_SIZE, GREEDY, make_id

META = Device(torch.device("meta"))
NAMES = ("llama", "gemma2", "gemma3", "qwen3", "phi3", "gpt_neox")


def step(layout: KVLayout, lengths: tuple[int, ...]) -> SchedulerOutput:
    """Sequences whose last so many tokens are computed."""
    end = BLOCK_SIZE + 3
    return SchedulerOutput(
        tuple(
            ScheduledSequence(
                make_id(f"r{index}"),
                tuple(range(5, 5 + length)),
                end - length,
                side_by_side(index, end, layout),
                (SampleTask(GREEDY),),
            )
            for index, length in enumerate(lengths)
        ),
        (),
    )


def on_meta(name: str) -> tuple[PreTrainedModel, KVLayout]:
    """A tiny model there. Which layout it has was seen on the host."""
    model = build_tiny(name)
    layout = use_paged_attention(model, "float32", BLOCK_SIZE)
    return nn.Module.to(model, "meta"), layout


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Kernels that are not run, since there is nothing to run them on; what they were given."""
    launches: list[Launch] = []
    monkeypatch.setattr(Launch, "run", lambda launch: launches.append(launch))  # noqa: PLW0108 - so it is a method
    return launches


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_torchs_attention_stays_on_the_device(name: str) -> None:
    """A chunk and two decodes."""
    model, layout = on_meta(name)
    runner = ModelRunner(model, layout, min_blocks(layout))
    batch = on_device(build_forward_batch(step(layout, (4, 1, 1)), BLOCK_SIZE), META)
    logits = runner.forward(batch)
    assert (logits.shape[0], logits.device.type) == (3, "meta")


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_a_step_of_kernels_stays_on_the_device(name: str, no_kernels: list[Launch]) -> None:
    """Whatever a kernel is given is there, and no number is waited for before the logits."""
    model, layout = on_meta(name)
    model.set_attn_implementation(TRITON_NAME)
    runner = ModelRunner(model, layout, min_blocks(layout))
    logits = runner.forward(on_device(build_forward_batch(step(layout, (4, 1, 1)), BLOCK_SIZE), META))
    assert (logits.shape[0], logits.device.type) == (3, "meta")
    assert {tensor.device.type for tensor in _tensors(no_kernels)} == {"meta"}


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_a_pass_in_a_fixed_shape_waits_for_nothing(name: str, no_kernels: list[Launch]) -> None:
    """What a graph would capture, and then do again on other numbers in the same place."""
    model, layout = on_meta(name)
    model.set_attn_implementation(TRITON_NAME)
    runner = ModelRunner(model, layout, min_blocks(layout), has_scratch=True)
    places: list[set[int]] = []

    def capture(compute: Pass) -> Pass:
        """Computes it twice."""
        for _ in range(2):
            no_kernels.clear()
            assert compute().shape[0] == 4
            places.append(
                {id(launch.arguments["tables"]) for launch in no_kernels if "tables" in launch.arguments}
            )
        return without_graph(compute)

    runner.capture_decodes([shape for shape in decode_shapes(4, 64) if shape.num_rows == 4], capture)
    assert places[0] == places[1]


def _tensors(launches: list[Launch]) -> list[torch.Tensor]:
    return [
        value for launch in launches for value in launch.arguments.values() if isinstance(value, torch.Tensor)
    ]
