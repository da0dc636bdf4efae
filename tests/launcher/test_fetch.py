"""`fetch`: a model in the cache, under a name that does not hang on the model's."""

from pathlib import Path

import pytest

from paceline.launcher.fetch import fetch


def test_a_link_leads_to_the_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Wherever the link is, and also once another model has been fetched; nothing else is left beside it."""
    link = tmp_path / "cache" / "model"
    other = tmp_path / "other"
    other.symlink_to(tiny_model_dir)
    for directory in (other, tiny_model_dir):
        assert fetch([str(directory), "--link", str(link)]) == 0
        assert (link / "config.json").read_bytes() == (tiny_model_dir / "config.json").read_bytes()
    assert list(link.parent.iterdir()) == [link]


def test_what_stands_in_the_way_stays(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory where the link should be is not removed: the error is one line, and nothing is left beside it."""
    link = tmp_path / "model"
    link.mkdir()
    assert fetch([str(tiny_model_dir), "--link", str(link)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [link]


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its name; no link is made."""
    assert fetch([str(tmp_path / "nowhere"), "--link", str(tmp_path / "model")]) == 1
    assert "there is no such directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
