"""Files that a reader can take in: each says what it is for, and few are long."""

import ast
from pathlib import Path

from tests.architecture.documents import ROOT
from tests.architecture.names import package_files, tree_of

MAX_LINES = 300
# Longer ones, each with its reason. A file that comes to be longer is split, or gets a line here.
LONG_FILES: dict[str, str] = {}


def test_every_file_says_what_it_is_for() -> None:
    """Each file of a package begins with a docstring."""
    assert [path for path in package_files() if not ast.get_docstring(tree_of(path))] == []


def test_few_files_are_long() -> None:
    """A file has at most 300 lines, or stands in the list with its reason."""
    assert _long_files(package_files(), MAX_LINES) <= set(LONG_FILES)


def test_the_list_of_long_files_is_of_files() -> None:
    """What is in the list exists, and a lower limit would find more."""
    assert all((ROOT / name).is_file() for name in LONG_FILES)
    assert _long_files(package_files(), 100) > set(LONG_FILES)


def _long_files(paths: list[Path], max_lines: int) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in paths if _num_lines(path) > max_lines}


def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())
