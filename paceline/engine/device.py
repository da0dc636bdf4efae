"""Where a worker computes: one CPU or one GPU, and how numbers of the host get there. It knows no model."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """What `--device` was resolved to; all tensors of one worker are there, but for those of the host."""

    place: torch.device

    @property
    def is_gpu(self) -> bool:
        """Whether work is handed to it and done later."""
        return self.place.type == "cuda"

    @property
    def is_host(self) -> bool:
        """Whether its memory is the host's."""
        return self.place.type == "cpu"

    def entered(self) -> AbstractContextManager[object]:
        """Makes it the thread's own, for what takes no device: kernels are run on the current one."""
        return torch.cuda.device(self.place) if self.is_gpu else nullcontext()

    def upload(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Tensors of the host, all int64, on the device: by one copy out of pinned memory, which nobody waits for.

        On a host they are left as they are. The pinned memory is torch's own to use again, once it has been read.
        """
        if self.is_host or not tensors:
            return tuple(tensors)
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        there = (flat.pin_memory() if self.is_gpu else flat).to(self.place, non_blocking=self.is_gpu)
        parts = torch.split(there, [tensor.numel() for tensor in tensors])
        return tuple(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))

    def finish(self) -> None:
        """Returns when all that this thread handed over is done: only then may others read what it has written."""
        if self.is_gpu:
            torch.cuda.current_stream(self.place).synchronize()

    def default_dtype(self, wanted: str, of_host: Callable[[str], str]) -> str:
        """`auto` as what it computes fast; what a host does, the host knows."""
        if wanted != "auto" or self.is_host:
            return of_host(wanted)
        with self.entered():
            return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


HOST = Device(torch.device("cpu"))


def find_device(wanted: str, turn: "Turn | None" = None) -> Device:
    """What `wanted` means on this machine: auto, cpu, cuda or cuda:N. Raises ConfigError for what is not there."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Device(torch.device(device_name(wanted, num_gpus, turn or Turn())))


@dataclass(frozen=True, slots=True)
class Turn:
    """This worker's number among the workers of one machine that share out its GPUs, and how many they are."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Turn":
        """Written 0/2; empty is alone. Raises ConfigError."""
        if not text:
            return cls()
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise ConfigError(f"--gpu-turn {text!r} is not of the form 0/2: a number from 0 on, of how many")
        return cls(int(index), int(count))

    def num_sharing(self, wanted: str, num_gpus: int) -> int:
        """How many of them compute on this one's GPU, itself among them, where there are so many: all, if all were told which."""
        if ":" in wanted:
            return self.count
        return len(range(self.index % num_gpus, self.count, num_gpus))


def device_name(wanted: str, num_gpus: int, turn: Turn) -> str:
    """Cpu or cuda:N, where there are so many GPUs; with `auto` and `cuda` each has its turn."""
    if wanted == "cpu" or (wanted == "auto" and num_gpus == 0):
        return "cpu"
    there = f"cpu and {', '.join(f'cuda:{index}' for index in range(num_gpus))}" if num_gpus else "cpu alone"
    if wanted in {"auto", "cuda"} and num_gpus:
        return f"cuda:{turn.index % num_gpus}"
    kind, _, number = wanted.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()) or wanted.endswith(":"):
        raise ConfigError(f"--device {wanted!r} is not auto, cpu, cuda or cuda:N")
    if not number or int(number) >= num_gpus:
        raise ConfigError(f"--device {wanted}: torch finds no such GPU here; there is {there}")
    return wanted
