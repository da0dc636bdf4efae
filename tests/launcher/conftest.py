"""What the launcher's tests start from."""

import os
from pathlib import Path

import pytest

from tests.launcher import stand_in

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A directory that looks like a model from outside."""
    directory = tmp_path / "model"
    directory.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (directory / file).write_text("{}", encoding="utf-8")
    (directory / "model.safetensors").touch()
    return directory


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started from here find stand-ins in the place of router and workers."""
    directory = tmp_path / "stand_ins"
    directory.mkdir()
    stand_in.install(directory)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), str(ROOT)]))
