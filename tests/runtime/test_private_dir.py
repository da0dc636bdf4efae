"""Directories that do not outlive their process."""

import subprocess
import sys
from pathlib import Path

from paceline.runtime.private_dir import private_dir


def test_it_is_gone_at_the_end(tmp_path: Path) -> None:
    """The directory exists inside the block, for this user alone, and not after it."""
    with private_dir(tmp_path, "x-") as directory:
        (directory / "file").touch()
        assert directory.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    """A new directory comes with the removal of those whose process is gone, and of no others."""
    code = (
        "import os, pathlib, sys; from paceline.runtime.private_dir import private_dir;"
        "held = private_dir(pathlib.Path(sys.argv[1]), 'x-'); held.__enter__(); os.kill(os.getpid(), 9)"
    )
    root = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", code, tmp_path], env={"PYTHONPATH": root}, check=False)
    (remains,) = tmp_path.iterdir()
    others = {"y-other", "x-somebody-elses"}
    for other in others:
        (tmp_path / other).mkdir()
    with private_dir(tmp_path, "x-") as first, private_dir(tmp_path, "x-") as second:
        assert not remains.exists()
        assert {path.name for path in tmp_path.iterdir()} == {first.name, second.name, *others}
