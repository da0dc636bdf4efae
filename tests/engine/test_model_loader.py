"""A directory becomes a model that we can serve, or is refused with the reason."""

import json
import pickle
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError, UnsupportedModelError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import LayerKV
from paceline.engine.conformance.architectures import build_tiny
from paceline.engine.model_loader import LoadedModel, load_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama on disk."""
    directory = tmp_path_factory.mktemp("llama")
    build_tiny("llama").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def loaded(directory: Path) -> LoadedModel:
    """The same, loaded."""
    return load_model(directory, "float32", 4)


def test_facts_of_a_model_come_from_its_directory(loaded: LoadedModel) -> None:
    """Layout, lengths, vocabulary and end tokens, as scheduling and routing need them."""
    assert loaded.layout.layers == (LayerKV(2, 8, 8), LayerKV(2, 8, 8))
    assert (loaded.layout.block_size, loaded.layout.dtype) == (4, "float32")
    assert (loaded.vocab_size, loaded.max_model_tokens) == (96, 256)
    assert loaded.eos_token_ids == {1}
    assert not loaded.model.training


def test_a_model_that_would_be_served_wrongly_is_refused(tmp_path: Path) -> None:
    """Loading a directory asks the model how it attends; the conformance tests have the other reasons."""
    build_tiny("llama4").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"Llama4ForCausalLM .* chunks"):
        load_model(tmp_path, "float32", 4)


def test_a_model_is_served_as_long_as_its_positions_mean_one_thing(tmp_path: Path) -> None:
    """With LongRoPE that is its original length: past it every position is turned differently."""
    build_tiny("phi3_longrope").save_pretrained(tmp_path)
    assert load_model(tmp_path, "float32", 4).max_model_tokens == 128


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    """The message names the directory, on one line."""
    with pytest.raises(ConfigError) as caught:
        load_model(tmp_path, "float32", 4)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


class Evil:
    """Leaves a file behind when its pickle is read."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._file,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.pt", "model.pt", "model.ckpt"])
def test_weights_that_are_no_safetensors_are_refused(directory: Path, tmp_path: Path, name: str) -> None:
    """A pickle can run code, so it is not read, wherever it lies and whatever is in it."""
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    ran, evil = tmp_path / "ran", pickle.dumps(Evil(tmp_path / "ran"))
    (tmp_path / name).write_bytes(evil)
    with pytest.raises(ConfigError):
        load_model(tmp_path, "float32", 4)
    assert not ran.exists()
    pickle.loads(evil)
    assert ran.exists()


def test_a_pickle_beside_safetensors_is_left_alone(directory: Path, tmp_path: Path) -> None:
    """The model is loaded, and the pickle is not read."""
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    load_model(tmp_path, "float32", 4)
    assert not (tmp_path / "ran").exists()


def test_code_out_of_the_directory_is_not_run(directory: Path, tmp_path: Path) -> None:
    """A config that asks for classes of its own is refused, and its file is never imported."""
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "custom", "auto_map": {"AutoConfig": "evil.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ConfigError):
        load_model(tmp_path, "float32", 4)
    assert not (tmp_path / "ran").exists()


def test_the_same_directory_has_the_same_fingerprint(directory: Path, loaded: LoadedModel) -> None:
    """Two workers that load the same files agree."""
    assert load_model(directory, "float32", 4).fingerprint == loaded.fingerprint


@pytest.mark.parametrize(
    ("name", "content", "field"),
    [
        ("tokenizer.json", "{}", "tokenizer"),
        ("chat_template.jinja", "{{ messages }}", "chat_template"),
        ("generation_config.json", '{"eos_token_id": 7}', "config"),
    ],
)
def test_each_file_that_decides_tokens_is_in_the_fingerprint(
    directory: Path, loaded: LoadedModel, tmp_path: Path, name: str, content: str, field: str
) -> None:
    """Another tokenizer, template or set of end tokens is another fingerprint, in that field alone."""
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(content)
    assert _differing(loaded, load_model(tmp_path, "float32", 4)) == [field]


def test_other_weights_have_another_fingerprint(loaded: LoadedModel, tmp_path: Path) -> None:
    """The content of the weights counts, not their name."""
    build_tiny("llama", seed=1).save_pretrained(tmp_path)
    assert _differing(loaded, load_model(tmp_path, "float32", 4)) == ["weights"]


def test_another_type_or_block_size_has_another_fingerprint(directory: Path, loaded: LoadedModel) -> None:
    """Blocks of another precision never pass between workers; those of another size do, once they are converted."""
    assert _differing(loaded, load_model(directory, "bfloat16", 4)) == ["dtype", "kv_dtype"]
    assert _differing(loaded, load_model(directory, "float32", 8)) == ["block_size"]


def _differing(one: LoadedModel, other: LoadedModel) -> list[str]:
    names = [field.name for field in fields(ModelFingerprint)]
    return [n for n in names if getattr(one.fingerprint, n) != getattr(other.fingerprint, n)]
