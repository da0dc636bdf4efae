"""Weights in the processor's own layout: the same model, which computes the same."""

import copy
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from paceline.engine.conformance.architectures import SERVED, build_tiny
from paceline.engine.fusion import PackedLinear, pack_linears
from paceline.engine.kv_cache import TORCH_DTYPES
from paceline.engine.model_loader import load_model

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (7, 10), (33, 1000), (64, 3), (576, 192)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_layer_gives_what_the_plain_one_gives(
    in_features: int, out_features: int, dtype: str, has_bias: bool
) -> None:
    """With one row, a few and many, and with more dimensions than two."""
    torch.manual_seed(0)
    linear = nn.Linear(in_features, out_features, bias=has_bias, dtype=TORCH_DTYPES[dtype]).requires_grad_(
        requires_grad=False
    )
    packed = PackedLinear(linear)
    for shape in ((1,), (5,), (130,), (1, 9), (2, 3, 4)):
        rows = torch.randn(*shape, in_features).to(linear.weight.dtype)
        torch.testing.assert_close(packed(rows), linear(rows), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_whoever_looks_at_a_packed_weight_sees_it() -> None:
    """Some modules ask their layers for their dtype, or compute with the weight itself."""
    linear = nn.Linear(20, 30, dtype=torch.bfloat16)
    assert torch.equal(PackedLinear(linear).weight, linear.weight)


def test_only_plain_layers_are_packed_and_what_they_share_stays() -> None:
    """Not those that are more than a layer, nor those that others have hooked into; an embedding that a layer shares is whole."""

    class Special(nn.Linear):
        """Its own kind."""

    class Odd(nn.Module):
        """What models are made of."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(30, 20)
            self.head = nn.Linear(20, 30, bias=False)
            self.head.weight = self.embedding.weight
            self.special, self.hooked = Special(20, 20), nn.Linear(20, 20)
            self.hooked.register_forward_hook(lambda _module, _inputs, output: output + 1)
            self.float16 = nn.Linear(20, 20, dtype=torch.float16)

    model = Odd()
    embedding = model.embedding.weight.detach().clone()
    with capture_logs() as logs:
        assert pack_linears(model) == 1  # type: ignore[arg-type] # any module will do
    kinds = {name: type(child) for name, child in model.named_children()}
    assert kinds.pop("embedding") is nn.Embedding
    assert kinds == {"head": PackedLinear, "special": Special, "hooked": nn.Linear, "float16": nn.Linear}
    assert torch.equal(model.embedding.weight, embedding)
    assert torch.equal(model.head.weight, embedding)
    assert logs == [{"event": "weights_packed", "log_level": "info", "num_layers": 1}]


def test_what_does_not_give_the_same_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor or a build of torch whose product is another, or is none, costs speed and nothing else."""

    def wrong(_self: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        """Another product."""
        return torch.ones(*rows.shape[:-1], 30)

    def missing(_self: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        """No product."""
        raise NotImplementedError

    for forward in (wrong, missing):
        monkeypatch.setattr(PackedLinear, "forward", forward)
        model = nn.Sequential(nn.Linear(20, 30))
        assert pack_linears(model) == 0  # type: ignore[arg-type] # the same
        assert type(model[0]) is nn.Linear


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in SERVED if not name.endswith("_latent")])
def test_every_architecture_gives_the_same_with_packed_weights(name: str) -> None:
    """Its own logits, by its own attention."""
    model = build_tiny(name)
    plain = copy.deepcopy(model)
    assert pack_linears(model) > 0
    with torch.inference_mode():
        expected, found = (each(IDS, use_cache=False).logits for each in (plain, model))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_fast_mode_packs_and_exact_mode_has_products_of_its_own(tiny_model_dir: Path) -> None:
    """Whose bits do not depend on the number of rows."""
    fast, exact = (
        load_model(tiny_model_dir, "float32", 16, exactness).model for exactness in ("fast", "exact")
    )
    assert any(isinstance(module, PackedLinear) for module in fast.modules())
    assert not any(isinstance(module, PackedLinear) for module in exact.modules())


def test_the_file_that_weights_were_read_from_is_let_go(tiny_model_dir: Path) -> None:
    """It is mapped while they are read; kept, a worker would hold them twice."""
    model = load_model(tiny_model_dir, "float32", 16).model
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert str(tiny_model_dir) not in mapped
    assert model is not None
