"""What follows from the processor's own description."""

from pathlib import Path

import pytest

from paceline.runtime.processor import resolve_dtype


@pytest.mark.parametrize(
    ("cpuinfo", "dtype"),
    [
        ("flags\t\t: fpu avx avx2 fma\n", "float32"),
        ("flags\t\t: fpu avx2 avx512f avx512bw\n", "bfloat16"),
        ("processor\t: 0\nflags\t: amx_bf16\n", "bfloat16"),
        ("Features\t: fp asimd bf16\n", "bfloat16"),
        ("model name\t: a processor with bf16\n", "float32"),
    ],
)
def test_auto_is_what_the_processor_computes_fast(tmp_path: Path, cpuinfo: str, dtype: str) -> None:
    """By its instructions, on both kinds of machine; a name is no instruction."""
    file = tmp_path / "cpuinfo"
    file.write_text(cpuinfo)
    assert resolve_dtype("auto", file) == dtype


def test_what_is_asked_for_is_taken(tmp_path: Path) -> None:
    """Whatever the processor is; one that says nothing of itself has float32."""
    assert [resolve_dtype(wanted, tmp_path / "none") for wanted in ("float32", "bfloat16", "auto")] == [
        "float32",
        "bfloat16",
        "float32",
    ]
