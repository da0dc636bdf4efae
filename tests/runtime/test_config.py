"""Settings from defaults, a file and flags."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.runtime.config import config_from_args, load_config, option, read_section


@dataclass(frozen=True)
class _Config:
    max_num_seqs: int = option(8, "how many run at once")
    grace_s: float = option(2.5, "how long to wait")
    mode: str = option("auto", "100% of it", choices=("auto", "never"))
    name: str | None = option(None, "what to call it")
    fast: bool = option(default=False, text="whether to hurry")

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError("max_num_seqs must be at least 1")


@dataclass(frozen=True)
class _KnowsItsFile:
    config: str | None = option(None, "the file")
    port: int = option(1, "a port")


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    """A config file with one section for `_Config`."""
    path = tmp_path / "paceline.toml"
    path.write_text('[thing]\nmax_num_seqs = 3\nmode = "never"\n[other]\nx = 1\n', encoding="utf-8")
    return path


def _load(*argv: str) -> _Config:
    return load_config(_Config, argv, prog="thing", section="thing", about="A thing.")


def _refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        _load(*argv)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_defaults() -> None:
    """Without flags and file, every setting has its default."""
    assert _load() == _Config(8, 2.5, "auto", None, fast=False)


def test_flags_win_over_the_file(toml: Path) -> None:
    """A flag beats the file, and the file beats the default."""
    loaded = _load("--config", str(toml), "--max-num-seqs", "5", "--fast")
    assert loaded == _Config(5, 2.5, "never", None, fast=True)


def test_the_other_sections_are_ignored(toml: Path) -> None:
    """A section that belongs to another service is none of ours."""
    assert read_section(_Config, toml, "absent") == {}


def test_a_class_may_learn_its_file(tmp_path: Path) -> None:
    """A class with a field `config` is told the file, which the file itself cannot set."""
    path = tmp_path / "c.toml"
    path.write_text("[up]\nport = 7\n", encoding="utf-8")
    assert config_from_args(_KnowsItsFile, ["--port", "2"]) == _KnowsItsFile(None, 2)
    loaded = load_config(_KnowsItsFile, ["--config", str(path)], prog="p", section="up", about="")
    assert loaded == _KnowsItsFile(str(path), 7)
    path.write_text('[up]\nconfig = "x"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="no setting 'config'"):
        read_section(_KnowsItsFile, path, "up")


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--max-num-seqs", "many"], "invalid int value"),
        (["--mode", "often"], "invalid choice"),
        (["--max-num", "3"], "unrecognized arguments"),
        (["--max-num-seqs", "0"], "must be at least 1"),
        (["--config", "/nowhere.toml"], "cannot read the config file"),
    ],
)
def test_a_wrong_flag_is_one_line(argv: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A setting that cannot work is refused with exit status 2 and one line that says why."""
    message = _refusal(capsys, *argv)
    assert why in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[thing]\nspeed = 1", "no setting 'speed'"),
        ('[thing]\nmode = "often"', "must be one of auto, never"),
        ('[thing]\nmax_num_seqs = "3"', "must be a int"),
        ("[thing]\nmax_num_seqs = true", "must be a int"),
        ("[thing]\nname = 3", "must be a str"),
        ("thing = 1", "must be a table"),
        ("[thing", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused(text: str, why: str, tmp_path: Path) -> None:
    """A file with an unknown key, a wrong type or no TOML in it is refused, naming the file."""
    path = tmp_path / "c.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=why) as caught:
        read_section(_Config, path, "thing")
    assert str(path) in str(caught.value)


def test_whole_numbers_are_durations_too(tmp_path: Path) -> None:
    """A float setting takes a whole number from the file."""
    path = tmp_path / "c.toml"
    path.write_text("[thing]\ngrace_s = 3\n", encoding="utf-8")
    value = read_section(_Config, path, "thing")["grace_s"]
    assert (value, type(value)) == (3.0, float)


def test_help_shows_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """--help explains each flag with its default."""
    with pytest.raises(SystemExit) as exit_:
        _load("--help")
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert "--no-fast" in shown
    assert "100% of it (default: auto)" in shown
