"""Who computes together, and with how many threads."""

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import HeadPart
from paceline.engine.parallel.group import join_group, set_threads_of_each
from paceline.engine.parallel.place import WHOLE, Place


def test_threads_are_shared_out_and_nobody_is_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own choice too."""
    shares: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", shares.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    for num_threads, num_ranks in ((8, 1), (8, 2), (8, 3), (8, 16), (0, 1), (0, 2)):
        set_threads_of_each(num_threads, num_ranks=num_ranks)
    assert shares == [8, 4, 2, 1, 6, 3]


def test_a_machine_with_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anybody waits for anybody: transformers would put a part of the model there, and we the rest here."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        join_group(WHOLE, "/nowhere", 1.0)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (3, 1), (1, 2), (1, 4)])
def test_each_rank_has_a_place_of_its_own(tp: int, pp: int) -> None:
    """Together they are the model, and rank 0 ends with the logits."""
    places = [Place.of(rank, tp=tp, pp=pp) for rank in range(tp * pp)]
    assert {place.count for place in places} == {tp * pp}
    assert sorted(place.in_group for place in places) == list(range(tp * pp))
    assert places[0].stage.is_last
    assert places[0].heads == HeadPart(0, tp)
    assert sum(place.stage.is_first for place in places) == tp


def test_one_process_is_all_of_it() -> None:
    """And needs no group."""
    assert Place.of(0, tp=1, pp=1) == WHOLE
