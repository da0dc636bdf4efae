"""The compiled attention: equal to the plain one, the same bits in any company, and never in the way of a start."""

import itertools
import os
import pwd
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import HeadPart, KVLayout, LayerKV
from paceline.engine.attention import ATTENTION_NAME, AttentionRules, attend, gather_by_head
from paceline.engine.conformance.architectures import SERVED, build_tiny
from paceline.engine.conformance.matrix import tiny_subject
from paceline.engine.conformance.paths import PATHS, Subject, run_path
from paceline.engine.forward_batch import QueryRange
from paceline.engine.kernels.cpu import build, paged_attention
from paceline.engine.kernels.cpu.build import NoKernelError
from paceline.engine.kernels.cpu.paged_attention import RaggedTables, register
from paceline.engine.kv_cache import TORCH_DTYPES, KVCache
from paceline.engine.model_loader import load_model, use_paged_attention
from paceline.engine.native_attention import NATIVE_NAME, choose_attention
from tests.engine.kernels.sanitized import run_checked

# Plain; soft caps and windows; sinks that are logits; value heads of another size; keys and values that layers share; all tokens' logits.
KINDS = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "gemma4", "gpt2")
# Of each sequence its tokens in the batch, and its context.
DECODES = ((1, 1), (1, 17), (1, 128), (1, 129), (1, 700))
MIXED = ((1, 33), (40, 40), (9, 300), (1, 257), (2, 5))


@pytest.fixture(autouse=True)
def compiled() -> None:
    """The kernel; where the machine has a compiler, it must build."""
    try:
        build._compiler()
    except NoKernelError as error:
        pytest.skip(str(error))
    register()


class Ragged:
    """Sequences whose blocks lie anywhere in a pool of which all else is not a number."""

    def __init__(
        self,
        layer: LayerKV,
        dtype: str,
        sequences: Sequence[tuple[int, int]],
        *,
        block_size: int = 16,
        seed: int = 0,
        num_parts: int = 1,
    ) -> None:
        torch.manual_seed(seed)
        lengths = [-(-context // block_size) for _, context in sequences]
        self.layer, self.dtype = layer, TORCH_DTYPES[dtype]
        whole = replace(layer, num_kv_heads=layer.num_kv_heads * num_parts)
        self.cache = KVCache(
            KVLayout((whole,), block_size, dtype),
            sum(lengths) + 1,
            heads=HeadPart(num_parts - 1, num_parts),
        )
        for view in (self.cache.keys[0], self.cache.values[0]):
            view.fill_(float("nan"))
        places = torch.split(torch.randperm(sum(lengths)) + 1, lengths)
        firsts = [sum(num for num, _ in sequences[:index]) for index in range(len(sequences))]
        self.queries = tuple(
            QueryRange(first, first + num, context, (place,))
            for first, (num, context), place in zip(firsts, sequences, places, strict=True)
        )
        for part, place in zip(self.queries, places, strict=True):
            slots = torch.tensor(
                [int(place[i // block_size]) * block_size + i % block_size for i in range(part.context)]
            )
            keys, values = (
                torch.randn(part.context, layer.num_kv_heads, dim) for dim in (layer.key_dim, layer.value_dim)
            )
            self.cache.write_tokens(0, slots, keys, values)

    def query(self, num_heads: int) -> Tensor:
        """Some, as the model lays them out: [num_tokens, num_heads, key_dim], heads apart."""
        num_tokens = self.queries[-1].last
        return torch.randn(num_tokens, num_heads, self.layer.key_dim).to(self.dtype)

    def native(
        self,
        query: Tensor,
        rules: AttentionRules,
        queries: Sequence[QueryRange] | None = None,
        operator: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """The kernel's answer; rows of other sequences than `queries` are nobody's."""
        tables = RaggedTables.of(queries or self.queries, 0)
        out: Tensor = (operator or torch.ops.paceline.paged_attention)(
            query,
            self.cache.keys[0],
            self.cache.values[0],
            tables.sequences,
            tables.tables,
            rules.sinks,
            rules.scaling,
            rules.softcap or 0.0,
            rules.view.window or 0,
            rules.view.num_sink_tokens,
        )
        return out

    def plain(self, query: Tensor, rules: AttentionRules) -> Tensor:
        """The reference's, in float32."""
        parts = []
        for part in self.queries:
            keys, values = gather_by_head(self.cache, 0, part, torch.float32)
            rows = query[part.first : part.last].transpose(0, 1).float()
            parts.append(attend(rows, keys, values, rules, num_left_out=part.context - keys.shape[1]))
        return torch.cat(parts, 1).transpose(0, 1)

    def require_equal(
        self, num_heads: int, *, softcap: float | None = None, with_sinks: bool = False
    ) -> None:
        """Both agree as far as the type can tell."""
        rules = AttentionRules(
            self.layer.key_dim**-0.5, self.layer.view, softcap, torch.randn(num_heads) if with_sinks else None
        )
        query = self.query(num_heads)
        expected = self.plain(query, rules)
        torch.testing.assert_close(self.native(query, rules).float(), expected, atol=self.tolerance, rtol=0)

    @property
    def tolerance(self) -> float:
        """How far its type lets both forms lie apart."""
        return 1e-5 if self.dtype is torch.float32 else 0.02


# -- what it computes


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("sequences", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 16])
def test_heads_that_share_keys_equal_the_plain_form(
    dtype: str, sequences: Sequence[tuple[int, int]], group: int
) -> None:
    """From every head its own keys to sixteen that share them."""
    Ragged(LayerKV(2, 64, 64), dtype, sequences).require_equal(2 * group)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (12, 20), (5, 3)]
)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_every_size_of_heads_and_blocks_equals_the_plain_form(
    dtype: str, key_dim: int, value_dim: int, block_size: int
) -> None:
    """Those that fill whole vectors, and those that do not."""
    Ragged(LayerKV(2, key_dim, value_dim), dtype, MIXED, block_size=block_size).require_equal(6)


@pytest.mark.parametrize("window", [None, 1, 7, 128, 1000])
@pytest.mark.parametrize("num_sink_tokens", [0, 4])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_caps_and_sinks_equal_the_plain_form(
    window: int | None, num_sink_tokens: int, softcap: float | None, with_sinks: bool
) -> None:
    """All that a layer may ask for."""
    layer = LayerKV(2, 16, 16, window=window, num_sink_tokens=num_sink_tokens if window else 0)
    Ragged(layer, "float32", (*MIXED, *DECODES)).require_equal(4, softcap=softcap, with_sinks=with_sinks)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_a_part_of_the_heads_equals_the_plain_form(dtype: str) -> None:
    """Between two tokens of a block lie heads of others, which are not looked at."""
    Ragged(LayerKV(2, 64, 48), dtype, (*MIXED, *DECODES), num_parts=3).require_equal(6)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(60))
def test_random_batches_equal_the_plain_form(seed: int) -> None:
    """Any of it together."""
    chance = random.Random(seed)
    kv_heads, window = chance.choice([1, 2, 3, 8]), chance.choice([None, None, 7, 100])
    layer = LayerKV(
        kv_heads,
        chance.choice([8, 20, 64, 80]),
        chance.choice([8, 20, 64, 80]),
        window=window,
        num_sink_tokens=chance.choice([0, 4]) if window else 0,
    )
    sequences = [
        (num, num + chance.randrange(300))
        for num in chance.choices([1, chance.randrange(1, 200)], weights=[3, 1], k=chance.randint(1, 9))
    ]
    ragged = Ragged(
        layer, chance.choice([*TORCH_DTYPES]), sequences, block_size=chance.choice([8, 16, 32]), seed=seed
    )
    ragged.require_equal(
        kv_heads * chance.choice([1, 2, 3, 5]),
        softcap=chance.choice([None, 20.0]),
        with_sinks=chance.random() < 0.3,
    )


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_a_row_is_the_same_bits_in_any_company(dtype: str) -> None:
    """Alone or in a batch, as a decode or as a chunk's last token, with one thread or several."""
    ragged = Ragged(LayerKV(3, 64, 64), dtype, (*DECODES, *MIXED))
    rules, query, num_threads = AttentionRules(0.125), ragged.query(9), torch.get_num_threads()
    together = ragged.native(query, rules)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(ragged.native(query, rules), together)
            for part in ragged.queries:
                alone = ragged.native(query, rules, [part])[part.first : part.last]
                assert torch.equal(alone, together[part.first : part.last])
                last = QueryRange(part.last - 1, part.last, part.context, part.block_tables)
                assert torch.equal(ragged.native(query, rules, [last])[last.first], together[last.first])
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.thorough
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_vectors_of_every_width_equal_the_plain_form(
    lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of processors that this one is not; and a row is the same bits in any company there too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", f"{' '.join(build._compiler())} -DLANES={lanes}")
    operator = paged_attention.build_operator()
    layers = (LayerKV(2, 64, 64), LayerKV(1, 20, 12, window=100, num_sink_tokens=4))
    for layer, dtype in itertools.product(layers, TORCH_DTYPES):
        ragged = Ragged(layer, dtype, (*DECODES, *MIXED))
        rules, query = AttentionRules(0.2, layer.view, 30.0, torch.randn(6)), ragged.query(6)
        found = ragged.native(query, rules, operator=operator)
        torch.testing.assert_close(found.float(), ragged.plain(query, rules), atol=ragged.tolerance, rtol=0)
        for part in ragged.queries:
            last = QueryRange(part.last - 1, part.last, part.context, part.block_tables)
            alone = ragged.native(query, rules, [last], operator=operator)
            assert torch.equal(alone[last.first], found[last.first])


def test_what_is_no_number_stays_with_its_sequence() -> None:
    """A broken neighbour changes nothing here, and is not made to look whole."""
    ragged = Ragged(LayerKV(1, 16, 16), "float32", ((1, 40), (1, 300)))
    rules, query = AttentionRules(0.25), ragged.query(2)
    before = ragged.native(query, rules)
    ragged.cache.keys[0][ragged.queries[1].block_tables[0][3]] = float("nan")
    after = ragged.native(query, rules)
    assert torch.equal(after[0], before[0])
    assert after[1].isnan().all()


@pytest.mark.slow
def test_it_reads_what_is_its_own_and_does_nothing_undefined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above once more, under the compiler's checks."""
    chosen = "no_number or company or windows or (every_size and 5-3)"
    run_checked(__file__, tmp_path, monkeypatch, "-k", chosen)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.thorough
def test_every_path_of_a_model_with_it_is_plain_transformers(name: str, path: str) -> None:
    """Chunks, batches, prefix hits, preemption and hand-over: logits within 1e-4 and the same greedy tokens."""
    _require_passed(name, path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SERVED if name not in KINDS])
def test_every_architecture_with_it_is_plain_transformers(name: str) -> None:
    """The path that asks most of a model."""
    _require_passed(name, "mixed")


def _require_passed(name: str, path: str) -> None:
    result = run_path(_subject(name), path)
    assert result.passed, result


@cache
def _subject(name: str) -> Subject:
    return tiny_subject(name, NATIVE_NAME)


# -- whether it is there


@pytest.fixture
def unbuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache in which nothing is built yet, and a process that has no kernel."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(paged_attention, "_LIBRARIES", [])
    return tmp_path / "paceline" / "kernels"


def test_it_is_the_choice_where_it_can_be_had(tiny_model_dir: Path) -> None:
    """And is not taken by whoever wants none."""
    names = {
        wanted: load_model(tiny_model_dir, "float32", 16, attention=wanted).model.config._attn_implementation
        for wanted in ("auto", "native", "torch")
    }
    assert names == {"auto": NATIVE_NAME, "native": NATIVE_NAME, "torch": ATTENTION_NAME}


def test_without_a_compiler_torch_computes(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log says how to change that; who insists on the kernel is told so, and nothing starts."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = build_tiny("llama")
    use_paged_attention(model, "float32", 16)
    with capture_logs() as logs:
        choose_attention(model, "auto")
    assert [(line["event"], "no-such-compiler" in line["reason"]) for line in logs] == [
        ("no_native_attention", True)
    ]
    assert model.config._attn_implementation == ATTENTION_NAME
    with pytest.raises(ConfigError, match=r"--attention native: there is no C\+\+ compiler .*apt install"):
        choose_attention(model, "native")
    assert not unbuilt.exists()


def test_what_the_compiler_says_is_told(unbuilt: Path, tmp_path: Path) -> None:
    """And no half of a library stays behind."""
    source = tmp_path / "broken.cpp"
    source.write_text("int half(")
    with pytest.raises(NoKernelError, match=r"cannot build broken.cpp: .*error"):
        build.load(source)
    assert list(unbuilt.iterdir()) == []


def test_it_is_built_once(unbuilt: Path, tmp_path: Path) -> None:
    """The next process takes it from the cache; another source, or another header beside it, is another library."""
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return 1; }')
    assert build.load(source).answer() == 1
    (library,) = unbuilt.iterdir()
    before = library.stat().st_mtime_ns
    assert build.load(source).answer() == 1
    assert library.stat().st_mtime_ns == before
    source.write_text('extern "C" int answer() { return 2; }')
    assert build.load(source).answer() == 2
    (tmp_path / "value.h").write_text("#define VALUE 3")
    source.write_text('#include "value.h"\nextern "C" int answer() { return VALUE; }')
    assert build.load(source).answer() == 3
    (tmp_path / "value.h").write_text("#define VALUE 4")
    assert build.load(source).answer() == 4
    assert len(list(unbuilt.iterdir())) == 4


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """C++ that is built at once."""
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return 3; }')
    return source


def test_a_library_that_does_not_load_is_built_again_in_its_place(
    unbuilt: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that only one start pays for it."""
    build.load(small)
    (sound,) = unbuilt.iterdir()
    # Elsewhere: what this process has loaded from a path, it has for good.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    broken = tmp_path / "other" / "paceline" / "kernels" / sound.name
    broken.parent.mkdir(parents=True, mode=0o700)
    broken.write_bytes(b"no library")
    assert build.load(small).answer() == 3
    assert list(broken.parent.iterdir()) == [broken]
    assert broken.stat().st_size == sound.stat().st_size


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_nothing_is_loaded_from_where_others_may_write(unbuilt: Path, small: Path, mode: int) -> None:
    """It is built for this process alone: whoever can write there could have put anything."""
    unbuilt.mkdir(parents=True)
    unbuilt.chmod(mode)
    assert build.load(small).answer() == 3
    assert list(unbuilt.iterdir()) == []


def test_nothing_is_loaded_from_another_user_s_directory(
    unbuilt: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when nobody else can write to it."""
    unbuilt.mkdir(parents=True, mode=0o700)
    owner = max(unbuilt.stat().st_uid, 1)
    os.chown(unbuilt, owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert build.load(small).answer() == 3
    assert list(unbuilt.iterdir()) == []


def test_a_place_that_is_no_directory_is_done_without(unbuilt: Path, small: Path) -> None:
    """It is built for this process alone."""
    unbuilt.parent.mkdir()
    unbuilt.touch()
    assert build.load(small).answer() == 3


def test_a_user_without_a_home_is_served(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that is run as a user whom nobody has made."""
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.chdir(tmp_path)
    assert build.load(small).answer() == 3
    assert list(tmp_path.iterdir()) == [small]


def test_where_nothing_can_be_written_there_is_no_kernel(
    unbuilt: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the cache nor a directory for what is thrown away: the worker starts all the same."""
    unbuilt.parent.mkdir()
    unbuilt.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(NoKernelError, match=r"small.cpp cannot be kept"):
        build.load(small)


def test_a_compiler_that_cannot_be_run_is_told(
    unbuilt: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file for another machine, for example, or one that is killed without a word."""
    compiler = tmp_path / "compiler"
    compiler.write_bytes(b"\x7fELF of no machine")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NoKernelError, match=r"compiler cannot be run: .*format"):
        build.load(small)
    compiler.write_text("#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(NoKernelError, match=r"compiler cannot build small.cpp: exit status -9"):
        build.load(small)
    assert list(unbuilt.iterdir()) == []


@pytest.mark.usefixtures("unbuilt")
def test_a_compiler_may_have_arguments(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As others' builds let it have them."""
    small.write_text('extern "C" int answer() { return ANSWER; }')
    for answer in (5, 6):
        monkeypatch.setenv("CXX", f"g++ -DANSWER={answer}")
        assert build.load(small).answer() == answer


def test_exact_mode_has_its_own(tiny_model_dir: Path) -> None:
    """Who asks for both is told so."""
    with pytest.raises(ConfigError, match="exact mode has an attention of its own"):
        load_model(tiny_model_dir, "float32", 16, exactness="exact", attention="native")


def test_what_it_is_not_written_for_goes_the_plain_way() -> None:
    """A cache of another type than the model's."""
    one, other = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8, dtype=torch.uint8)
    assert paged_attention.takes(one, one, one)
    assert not paged_attention.takes(one, other, other)
    assert not paged_attention.takes(one.double(), one.double(), one.double())
