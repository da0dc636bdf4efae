"""Which device a worker computes on, as far as plain numbers decide it, and how numbers get there."""

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.engine.device import HOST, Device, Turn, device_name, find_device


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "turn", "name"),
    [
        ("auto", 0, "", "cpu"),
        ("auto", 2, "", "cuda:0"),
        ("auto", 2, "1/4", "cuda:1"),
        ("auto", 2, "2/4", "cuda:0"),
        ("cuda", 2, "3/4", "cuda:1"),
        ("cpu", 2, "1/4", "cpu"),
        ("cuda:1", 2, "0/4", "cuda:1"),
    ],
)
def test_a_device_is_what_it_says_or_whose_turn_it_is(
    wanted: str, num_gpus: int, turn: str, name: str
) -> None:
    """Auto is a GPU wherever there is one; workers of one machine take them in turns."""
    assert device_name(wanted, num_gpus, Turn.parse(turn)) == name


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "message"),
    [
        ("cuda", 0, "there is cpu alone"),
        ("cuda:2", 2, "there is cpu and cuda:0, cuda:1"),
        ("cuda:", 2, "is not auto, cpu, cuda or cuda:N"),
        ("cuda:x", 2, "is not auto, cpu, cuda or cuda:N"),
        ("gpu", 2, "is not auto, cpu, cuda or cuda:N"),
    ],
)
def test_what_is_not_there_is_refused(wanted: str, num_gpus: int, message: str) -> None:
    """With what there is."""
    with pytest.raises(ConfigError, match=message):
        device_name(wanted, num_gpus, Turn())


@pytest.mark.parametrize("text", ["1", "2/2", "a/2", "-1/2", "1/"])
def test_a_turn_that_makes_no_sense_is_refused(text: str) -> None:
    """It is a number of how many."""
    with pytest.raises(ConfigError, match="--gpu-turn"):
        Turn.parse(text)


@pytest.mark.parametrize(
    ("wanted", "turn", "num_gpus", "num_sharing"),
    [
        ("auto", "0/1", 1, 1),
        ("auto", "0/2", 1, 2),
        ("cuda", "0/3", 2, 2),
        ("cuda", "1/3", 2, 1),
        ("auto", "1/2", 8, 1),
        ("cuda:1", "0/3", 2, 3),
    ],
)
def test_workers_know_how_many_share_their_gpu(
    wanted: str, turn: str, num_gpus: int, num_sharing: int
) -> None:
    """Themselves among them."""
    assert Turn.parse(turn).num_sharing(wanted, num_gpus) == num_sharing


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_is_the_host() -> None:
    """And its tensors stay what they are."""
    device = find_device("auto")
    numbers = torch.arange(3)
    assert device == HOST
    assert device.upload((numbers,))[0] is numbers


def test_numbers_are_uploaded_in_their_shapes() -> None:
    """By one copy, whatever they are; the device is one that has shapes and no numbers."""
    there = Device(torch.device("meta")).upload(
        (torch.arange(6).view(2, 3), torch.arange(0), torch.arange(4))
    )
    assert [(tuple(each.shape), each.device.type) for each in there] == [
        ((2, 3), "meta"),
        ((0,), "meta"),
        ((4,), "meta"),
    ]
