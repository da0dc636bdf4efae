"""`python -m tests.engine.parallel.compare RANK TP PP DIRECTORY NAME...`: one rank of several that compute tiny models together.

Rank 0 prints a JSON object: by name how far (relative L2) their logits are from those of one process, or why there are none.
"""

import json
import sys
import traceback
from pathlib import Path

import torch
from torch import Tensor, distributed

from paceline.core.kv_layout import min_blocks
from paceline.core.request import SamplingParams
from paceline.engine.conformance.architectures import build_tiny
from paceline.engine.forward_batch import build_forward_batch
from paceline.engine.model_loader import load_model
from paceline.engine.model_runner import ModelRunner, require_same_as_transformers, side_by_side
from paceline.engine.parallel.group import join_group
from paceline.engine.parallel.place import WHOLE, Place
from paceline.engine.parallel.stages import StagedForward
from paceline.engine.step import SampleTask, ScheduledSequence, SchedulerOutput
from tests.factories import make_id

BLOCK_SIZE = 8
PROMPT_IDS = tuple((7 * i + 3) % 96 for i in range(30))


def main(argv: list[str]) -> None:
    """Compares them one after the other."""
    (rank, tp, pp), directory = map(int, argv[:3]), Path(argv[3])
    torch.set_num_threads(1)
    place = Place.of(rank, tp=tp, pp=pp)
    join_group(place, str(directory / "rendezvous"), 60.0)
    found = {name: _compared(name, rank, place, directory / name) for name in argv[4:]}
    if rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")


def _compared(name: str, rank: int, place: Place, directory: Path) -> float | str:
    # In a group, only its first process saves anything.
    if place.in_group == 0:
        build_tiny(name).save_pretrained(directory)
    distributed.barrier()
    try:
        whole, part = (_logits(directory, each) for each in (WHOLE, place))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return float((part - whole).norm() / whole.norm()) if rank == 0 else 0.0


@torch.inference_mode()
def _logits(directory: Path, place: Place) -> Tensor:
    """Of a prompt in two chunks."""
    loaded = load_model(directory, "float32", BLOCK_SIZE, attention="torch", place=place)
    layout = loaded.layout
    num_blocks = min_blocks(layout) * 4
    runner = ModelRunner(loaded.model, layout, num_blocks, heads=place.heads)
    if place.count > 1:
        require_same_as_transformers(runner, loaded.model, layout)
        assert layout == load_model(directory, "float32", BLOCK_SIZE, attention="torch").layout
    tables = side_by_side(0, len(PROMPT_IDS), layout)
    logits = torch.empty(0)
    for first, last in ((0, 20), (20, 30)):
        item = ScheduledSequence(
            make_id(), PROMPT_IDS[first:last], first, tables, samples=(SampleTask(SamplingParams()),)
        )
        logits = runner.forward(build_forward_batch(SchedulerOutput((item,), ()), BLOCK_SIZE))
    if isinstance(loaded.model.forward, StagedForward):
        loaded.model.forward.flush()
    return logits


if __name__ == "__main__":
    main(sys.argv[1:])
