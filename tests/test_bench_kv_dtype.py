"""`./run bench kv-dtype`: its numbers are what they are called."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.reading import generate, is_same_choice, losses
from paceline.engine.conformance.reference import plain_reference
from paceline.engine.model_loader import load_model
from paceline.engine.model_runner import ModelRunner

KEYS = ("fp8_ppl_ratio", "int8_ppl_ratio", "fp8_greedy_agreement", "int8_greedy_agreement", "bytes_ratio")


def test_it_prints_a_table_and_writes_its_keys(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row for each type of KV; plain KV agrees with itself, and the fewer bits the less another one does."""
    file = tmp_path / "numbers.json"
    sizes = ["--max-tokens", "120", "--prompts", "4", "--new-tokens", "24", "--threads", "1"]
    assert main(["kv-dtype", "--model", str(tiny_model_dir), *sizes, "--json", str(file)]) == 0
    printed, numbers = capsys.readouterr().out, json.loads(file.read_text())
    rows = {row["name"]: row for row in numbers["rows"]}
    assert all(name in printed for name in rows)
    assert rows["float32"]["greedy_agreement"] == rows["float32"]["greedy_until_first"] == 1.0
    assert all(0 < numbers[key] < 2 for key in KEYS)
    assert numbers["bytes_ratio"] == 18 / 32
    assert numbers["int4_greedy_agreement"] < numbers["int8_greedy_agreement"]
    assert numbers["int4_greedy_until_first"] <= numbers["int4_greedy_agreement"]
    assert numbers["int8_ppl_ratio_beyond_4096"] is None


@torch.inference_mode()
def test_reading_in_chunks_gives_the_losses_of_transformers(tiny_model_dir: Path) -> None:
    """The loss of each token after the first one, also past the end of a chunk."""
    loaded = load_model(tiny_model_dir, "float32", 16)
    text = tuple((i * i + 3) % loaded.vocab_size for i in range(600))
    found = losses(ModelRunner(loaded.model, loaded.layout, num_blocks=40), text)
    logits = plain_reference(loaded.model, text, 1).logits[:-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:]), reduction="none")
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@torch.inference_mode()
def test_generating_is_greedy_and_choices_are_compared_token_by_token(tiny_model_dir: Path) -> None:
    """What is generated is plain transformers' output, and a token that is changed is the one that differs."""
    loaded = load_model(tiny_model_dir, "float32", 16)
    runner = ModelRunner(loaded.model, loaded.layout, num_blocks=8)
    prompts = ((5, 6, 7), (8, 9, 10, 11))
    outputs = generate(runner, prompts, 6, print)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output == plain_reference(loaded.model, prompt, 6).output_ids
        assert is_same_choice(runner, prompt, output).all()
    wrong = (*outputs[0][:3], (outputs[0][3] + 1) % loaded.vocab_size)
    assert is_same_choice(runner, prompts[0], wrong).tolist() == [True, True, True, False]
