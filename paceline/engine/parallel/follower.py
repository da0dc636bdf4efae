"""A follower: loads its part of the model, maps the worker's blocks, and computes the steps that rank 0 says, until it says no more."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from paceline.core.errors import EngineFailedError
from paceline.engine.checked import load_checked
from paceline.engine.forward_batch import build_forward_batch
from paceline.engine.model_loader import LoadedModel
from paceline.engine.model_runner import ModelRunner
from paceline.engine.parallel.group import join_group
from paceline.engine.parallel.link import Link
from paceline.engine.parallel.messages import Done, Pool, Start, Step, decode_to_follower, encode, outputs_of
from paceline.engine.parallel.place import Place
from paceline.engine.parallel.stages import StagedForward
from paceline.runtime.log import get_logger
from paceline.runtime.pool_memory import PoolMemory

log = get_logger()
_DONE = encode(Done())


def follow(link: Link) -> None:
    """Returns when rank 0 closes its end of the link, or is gone: whoever ends it says why."""
    with suppress(EngineFailedError):
        start = decode_to_follower(link.receive())
        assert isinstance(start, Start), "the model comes first"
        loaded = _load(start)
        link.send(_DONE)
        pool = decode_to_follower(link.receive())
        assert isinstance(pool, Pool), "then the blocks"
        runner = _runner(loaded, pool)
        link.send(_DONE)
        log.info("follower_ready", rank=start.rank, num_threads=torch.get_num_threads())
        _follow_steps(link, runner, loaded)


def _load(start: Start) -> LoadedModel:
    torch.set_num_threads(start.num_threads)
    place = Place.of(start.rank, tp=start.tp, pp=start.pp)
    join_group(place, start.rendezvous, start.timeout_s)
    return load_checked(
        Path(start.model), start.dtype, start.block_size, attention=start.attention, place=place
    )


def _runner(loaded: LoadedModel, pool: Pool) -> ModelRunner:
    layout = replace(loaded.layout, dtype=pool.kv_dtype)
    memory = PoolMemory(pool.memory.num_bytes, joins=pool.memory)
    return ModelRunner(loaded.model, layout, pool.num_blocks, heads=loaded.place.heads, pool=memory)


@torch.inference_mode()
def _follow_steps(link: Link, runner: ModelRunner, loaded: LoadedModel) -> None:
    block_size, forward = loaded.layout.block_size, loaded.model.forward
    while True:
        step = decode_to_follower(link.receive())
        assert isinstance(step, Step), "then steps, and nothing else"
        if step.num_threads != torch.get_num_threads():
            torch.set_num_threads(step.num_threads)
        for batch in outputs_of(step):
            runner.forward(build_forward_batch(batch, block_size))
        if isinstance(forward, StagedForward):
            forward.flush()
        link.send(_DONE)
