"""Which attention a model gets, by what was asked for and where it is. None of it needs the GPU that it is asked about."""

import sys

import pytest
import torch
from structlog.testing import capture_logs

from paceline.core.errors import ConfigError
from paceline.engine.attention import ATTENTION_NAME
from paceline.engine.native_attention import attention_name
from paceline.engine.triton_attention import TRITON_NAME

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize("wanted", ["auto", "triton"])
def test_a_gpu_has_the_kernels_that_are_made_for_it(wanted: str) -> None:
    """In whatever its numbers are."""
    assert attention_name(wanted, GPU, torch.bfloat16) == TRITON_NAME


def test_torch_is_torch_everywhere() -> None:
    """Who asks for it gets it."""
    assert {attention_name("torch", device) for device in (CPU, GPU)} == {ATTENTION_NAME}


@pytest.mark.parametrize(
    ("wanted", "device", "message"),
    [
        ("native", GPU, "native is for CPUs"),
        ("triton", CPU, "needs a GPU; on a CPU only Triton's interpreter"),
    ],
)
def test_what_is_made_for_another_device_is_refused(wanted: str, device: torch.device, message: str) -> None:
    """With what to do."""
    with pytest.raises(ConfigError, match=message):
        attention_name(wanted, device)


def test_without_triton_a_gpu_computes_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log says so; who insists on the kernels is told how to get them."""
    monkeypatch.setitem(sys.modules, "paceline.engine.triton_attention", None)
    with capture_logs() as logs:
        assert attention_name("auto", GPU) == ATTENTION_NAME
    assert [line["event"] for line in logs] == ["no_triton_attention"]
    with pytest.raises(ConfigError, match=r"pip install .*\[gpu\]"):
        attention_name("triton", GPU)
