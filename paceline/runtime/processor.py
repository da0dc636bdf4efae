"""What this machine's processor can do, without asking a library that takes seconds to load."""

from pathlib import Path

# Instructions that multiply bfloat16, or vectors wide enough that doing without costs little.
_BFLOAT16 = {"avx512bw", "avx512_bf16", "amx_bf16", "bf16", "svebf16"}


def resolve_dtype(wanted: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """`auto` as what this processor computes fast: bfloat16 where it has instructions for it, else float32."""
    if wanted != "auto":
        return wanted
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return "float32"
    has = {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}
    return "bfloat16" if has & _BFLOAT16 else "float32"
