"""Every path through the engine gives the logits and tokens of plain transformers, and a broken engine is noticed."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from torch import Tensor, nn
from transformers import AttentionInterface

from paceline.core.errors import UnsupportedModelError
from paceline.engine.attention import current_attention, paged_attention
from paceline.engine.conformance.__main__ import main
from paceline.engine.conformance.architectures import REFUSED, SERVED, WINDOW, WITH_LATENTS, build_tiny
from paceline.engine.conformance.bench import ComparingRunner
from paceline.engine.conformance.matrix import TINY_BLOCK_SIZE, Row, tiny_names, tiny_subject
from paceline.engine.conformance.paths import PATHS, PathResult, Subject, make_subject, run_path
from paceline.engine.conformance.report import as_json, summary, table_line
from paceline.engine.model_loader import use_paged_attention

# One of each kind: plain; windows; soft caps; sinks; keys and values of other sizes; a mask that the call does not
# tell of; shared keys and values, heads that differ between layers; learned positions; all tokens' logits only.
KINDS = (
    "llama",
    "mistral",
    "gemma2",
    "gpt_oss",
    "deepseek_v3",
    "qwen2_moe",
    "gemma4",
    "mimo_v2_flash",
    "gpt2",
)
WINDOWED = ("mistral", "gemma3", "gemma4", "gpt_oss", "qwen2_moe")
OK = PathResult("whole", 1e-6, num_logits=9, num_tokens=3, num_wrong_tokens=0, duration_s=0.1)


@cache
def _subject(name: str) -> Subject:
    return tiny_subject(name)


def test_the_matrix_has_at_least_thirty_architectures() -> None:
    """Thirty are served at the least, and none stands in both lists."""
    assert len(SERVED) >= 30
    assert len(set(tiny_names())) == len(SERVED) + len(WITH_LATENTS) + len(REFUSED)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", [*KINDS, "deepseek_v3_latent"])
def test_every_path_of_each_kind_of_model_is_plain_transformers(name: str, path: str) -> None:
    """Chunks, batches, prefix hits, preemption and hand-over: logits within 1e-4 and the same greedy tokens."""
    _require_passed(run_path(_subject(name), path))


@pytest.mark.parametrize("name", [name for name in SERVED if name not in KINDS])
def test_every_architecture_is_plain_transformers_in_a_mixed_batch(name: str) -> None:
    """The path that asks most of a model, for those whose whole row is left to the slow tier."""
    _require_passed(run_path(tiny_subject(name), "mixed"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SERVED if name not in KINDS])
def test_every_path_of_every_architecture_is_plain_transformers(name: str) -> None:
    """The rest of the matrix."""
    subject = tiny_subject(name)
    for path in PATHS:
        _require_passed(run_path(subject, path))


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_be_served_wrongly_is_refused(name: str) -> None:
    """Attention of its own, a recurrent state, a mask that is no window: refused as at a worker's start."""
    with pytest.raises(UnsupportedModelError, match=r"attention|cannot be served"):
        tiny_subject(name)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mutant", ["scale", "slots"])
def test_wrong_attention_is_noticed_on_every_path(mutant: str, path: str) -> None:
    """A scale that is off by a hundredth, and tokens stored one slot further, fail wherever they happen."""
    assert not run_path(_mutated("llama", MUTANTS[mutant]), path).passed


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_that_is_off_by_one_is_noticed(name: str, step: int) -> None:
    """A token more or less in sight fails, for each way in which a model has windows."""
    subject = _subject(name)
    layers = subject.layout.layers
    assert any(layer.window == WINDOW for layer in layers)
    off = tuple(replace(layer, window=layer.window and layer.window + step) for layer in layers)
    assert not run_path(replace(subject, layout=replace(subject.layout, layers=off)), "whole").passed


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_every_row_of_the_matrix_can_fail(name: str) -> None:
    """No tiny model is so dull that a scale off by a hundredth would go unseen."""
    assert not run_path(_mutated(name, MUTANTS["scale"]), "whole").passed


def test_bfloat16_gives_the_same_logits_within_its_precision() -> None:
    """In bf16 the distance to plain transformers is that of rounding, a hundredth of what the logits spread."""
    model = build_tiny("llama").bfloat16()
    subject = make_subject(model, use_paged_attention(model, "bfloat16", TINY_BLOCK_SIZE))
    result = run_path(subject, "chunk 7")
    assert 0 < result.max_difference < 0.1 * float(subject.long.logits.std())


def test_the_command_prints_a_table_and_writes_the_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A row for each architecture, all paths of it in the JSON, and the status of success."""
    assert main(["llama", "bloom", "--json", str(tmp_path / "numbers.json")]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in (*PATHS, "llama", "bloom", "refused", "all good"))
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    counts = [numbers[key] for key in ("architectures", "cases", "failed", "refused")]
    assert counts == [1, len(PATHS), 0, 1]
    assert 0 < numbers["max_difference"] < numbers["tolerance"] == 1e-4


def test_the_command_checks_a_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A model of one's own, with a window that the chosen prompt does not pass; that is said."""
    build_tiny("mistral").save_pretrained(tmp_path)
    assert main(["--model", str(tmp_path), "--prompt-tokens", str(WINDOW - 1)]) == 0
    assert "note" in capsys.readouterr().out
    assert main(["--model", str(tmp_path)]) == 0
    assert "note" not in capsys.readouterr().out


def test_the_command_fails_for_a_model_that_is_not_served(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The status is 1 and the reason is printed; a directory without a model is status 2."""
    build_tiny("bloom").save_pretrained(tmp_path / "bloom")
    assert main(["--model", str(tmp_path / "bloom")]) == 1
    assert "BloomForCausalLM" in capsys.readouterr().out
    assert main(["--model", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("row", "num_failed"),
    [
        (Row("good", results=(OK, OK)), 0),
        (Row("far", results=(OK, replace(OK, max_difference=2e-4))), 1),
        (Row("tokens", results=(replace(OK, num_wrong_tokens=1),)), 1),
        (Row("crashed", results=(replace(OK, crash="ValueError: odd"),)), 1),
        (Row("lenient", results=(replace(OK, max_difference=2e-4, tolerance=1e-3),)), 0),
        (Row("refused", refusal="because"), 1),
        (Row("rightly", is_to_be_served=False, refusal="because"), 0),
        (Row("served", is_to_be_served=False, results=(OK,)), 1),
    ],
    ids=lambda value: value.architecture if isinstance(value, Row) else "",
)
def test_whatever_went_wrong_is_counted_and_shown(row: Row, num_failed: int) -> None:
    """A distance, a token, a refusal, or none where one was due."""
    assert as_json([row], duration_s=1.0)["failed"] == num_failed
    assert ("FAILED" in summary([row])) == bool(num_failed)
    assert any(mark in table_line(row) for mark in ("!", "FAILED")) == bool(num_failed)


def test_a_crash_fails_its_cell_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that raises is shown with its reason and counted once; the paths after it run."""

    def crash(_: Subject) -> ComparingRunner:
        raise ValueError("no such thing\nand more")

    monkeypatch.setitem(cast("dict[str, Any]", PATHS), "chunk 7", crash)
    assert main(["llama", "gpt2"]) == 1
    out = capsys.readouterr().out
    assert out.count("!crash") == 2
    assert out.count("chunk 7: ValueError: no such thing\n") == 2
    assert "2 FAILED: 2 architectures, 20 cases" in out


def test_a_prompt_of_whole_blocks_is_found_but_for_its_last_token() -> None:
    """A prompt that ends with a block is a full hit at its last boundary: one token of it is computed again."""
    model = build_tiny("llama")
    layout = use_paged_attention(model, "float32", TINY_BLOCK_SIZE)
    _require_passed(
        run_path(make_subject(model, layout, num_prompt_tokens=9 * TINY_BLOCK_SIZE), "prefix hit")
    )


def test_a_user_chooses_the_tolerance_of_their_own_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A tolerance below what rounding gives fails every path, one above passes; the table says which it was."""
    build_tiny("llama").save_pretrained(tmp_path)
    assert main(["--model", str(tmp_path), "--tolerance", "1e-12"]) == 1
    assert "10 FAILED" in capsys.readouterr().out
    assert main(["--model", str(tmp_path), "--tolerance", "0.5"]) == 0
    assert "(allowed 5e-01)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--tolerance", "1"], "--tolerance is for a model of your own"),
        (["--prompt-tokens", "9"], "--prompt-tokens is for a model of your own"),
        (["--model", "m", "--tolerance", "nan"], "must be a number above 0"),
        (["--model", "m", "--tolerance", "0"], "must be a number above 0"),
        (["--model", "m", "--prompt-tokens", "-1"], "must be a number above 0"),
    ],
)
def test_an_option_without_sense_is_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], why: str
) -> None:
    """What would be ignored, or could not be, is an error of the command line."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert why in capsys.readouterr().err


def test_what_is_no_number_is_as_far_away_as_can_be() -> None:
    """A logit that is not a number fails like any wrong one, and the JSON stays JSON."""
    result = run_path(_mutated("llama", MUTANTS["nan"]), "whole")
    assert not result.passed
    assert json.loads(json.dumps(result.max_difference)) > 1e30


def _require_passed(result: PathResult) -> None:
    assert result.num_tokens > 0
    assert result.passed, result


def _mutated(name: str, attention: str) -> Subject:
    """A model whose attention is the one registered under this name."""
    model = build_tiny(name)
    return make_subject(model, use_paged_attention(model, "float32", TINY_BLOCK_SIZE), attention=attention)


def _wrong_scale(module: nn.Module, query: Tensor, *rest: Any, **kwargs: Any) -> tuple[Tensor, None]:
    scaling = 1.01 * kwargs.pop("scaling", query.shape[-1] ** -0.5)
    return paged_attention(module, query, *rest, scaling=scaling, **kwargs)


def _shifted_slots(module: nn.Module, query: Tensor, *rest: Any, **kwargs: Any) -> tuple[Tensor, None]:
    context = current_attention.get()
    num_slots = context.cache.keys[0].shape[0] * TINY_BLOCK_SIZE
    shifted = tuple((slots + 1) % num_slots for slots in context.batch.slot_mappings)
    batch = replace(context.batch, slot_mappings=shifted)
    token = current_attention.set(replace(context, batch=batch))
    try:
        return paged_attention(module, query, *rest, **kwargs)
    finally:
        current_attention.reset(token)


def _not_a_number(module: nn.Module, query: Tensor, *rest: Any, **kwargs: Any) -> tuple[Tensor, None]:
    out, _ = paged_attention(module, query, *rest, **kwargs)
    return out * float("nan"), None


def _register(name: str, function: Callable[..., Any]) -> str:
    AttentionInterface.register(name, function)
    return name


MUTANTS = {
    "scale": _register("test_wrong_scale", _wrong_scale),
    "slots": _register("test_shifted_slots", _shifted_slots),
    "nan": _register("test_not_a_number", _not_a_number),
}
