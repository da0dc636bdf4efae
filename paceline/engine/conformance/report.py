"""The matrix as a table for people and as numbers for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.engine.conformance.matrix import Row
from paceline.engine.conformance.paths import PATHS, TOLERANCE, PathResult

_NAME_WIDTH = 18
_CELL_WIDTH = 13


def table_head() -> str:
    """The names of the paths."""
    paths = "".join(f"{path:>{_CELL_WIDTH}}" for path in PATHS)
    return f"{'architecture':<{_NAME_WIDTH}}{paths}{'seconds':>9}"


def table_line(row: Row) -> str:
    """Each path's largest difference, with `!` and the number of wrong tokens where it failed; or the refusal.

    A path that crashed has its reason in a line of its own.
    """
    name = f"{row.architecture:<{_NAME_WIDTH}}"
    if row.refusal:
        return f"{name}  {'FAILED' if row.is_to_be_served else 'refused'}: {row.refusal}"
    if not row.is_to_be_served:
        return f"{name}  FAILED: it is served, and should be refused"
    seconds = sum(result.duration_s for result in row.results)
    cells = "".join(f"{_cell(result):>{_CELL_WIDTH}}" for result in row.results)
    notes = [
        *(f"{result.path}: {result.crash}" for result in row.results if result.crash),
        *(
            f"note: no prompt is longer than the window of {window} tokens (--prompt-tokens)"
            for window in row.unreached_windows
        ),
        *([] if row.latent_share is None else [f"note: latents take {row.latent_share:.1%} of the memory"]),
    ]
    return "\n".join([f"{name}{cells}{seconds:>9.1f}", *(f"{'':<{_NAME_WIDTH}}  {note}" for note in notes)])


def summary(rows: Sequence[Row]) -> str:
    """The last line."""
    numbers = as_json(rows, duration_s=0.0)
    verdict = "all good" if numbers["failed"] == 0 else f"{numbers['failed']} FAILED"
    return (
        f"{verdict}: {numbers['architectures']} architectures, {numbers['cases']} cases, "
        f"largest difference {numbers['max_difference']:.1e} (allowed {numbers['tolerance']:.0e}); "
        f"{numbers['refused']} refused as they should be"
    )


def as_json(rows: Sequence[Row], *, duration_s: float) -> dict[str, Any]:
    """Everything that was found."""
    results = [(row.architecture, result) for row in rows for result in row.results]
    return {
        "architectures": sum(bool(row.results) for row in rows),
        "cases": len(results),
        "failed": sum(row.num_failed for row in rows),
        "refused": sum(bool(row.refusal) and not row.is_to_be_served for row in rows),
        "max_difference": max((result.max_difference for _, result in results), default=0.0),
        "tolerance": max((result.tolerance for _, result in results), default=TOLERANCE),
        "duration_s": duration_s,
        "results": [{"architecture": name, **asdict(result)} for name, result in results],
        "latent_shares": {row.architecture: row.latent_share for row in rows if row.latent_share},
        "refusals": {row.architecture: row.refusal for row in rows if row.refusal},
    }


def _cell(result: PathResult) -> str:
    if result.crash:
        return "!crash"
    if result.passed:
        return f"{result.max_difference:.1e}"
    return f"{result.max_difference:.1e}!{result.num_wrong_tokens}"
