"""The examples in languages that are compiled, or whose stubs are generated: what each needs, and how it is built."""

import asyncio
import os
import shutil
import subprocess
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT


@dataclass(frozen=True, slots=True)
class Language:
    """One directory of examples, whose `build` makes what is called as `program`."""

    name: str
    program: str = "out/generate"

    @property
    def directory(self) -> Path:
        """Inside a checkout, or a copy of it."""
        return Path("examples") / self.name

    def packages(self) -> list[str]:
        """The packages of Debian that its `build` names to the reader."""
        script = (ROOT / self.directory / "build").read_text(encoding="utf-8")
        named = script.partition("apt-get install ")[2].partition("\nset ")[0]
        return named.replace("\\\n#", " ").split()

    def missing(self) -> list[str]:
        """Those of them that are not installed."""
        return [package for package in self.packages() if not _is_installed(package)]


LANGUAGES = (
    Language("go"),
    Language("cpp"),
    Language("ruby", "generate.rb"),
    Language("java"),
)


def _is_installed(package: str) -> bool:
    query = shutil.which("dpkg-query")
    if query is None:
        return False
    command = [query, "--show", "--showformat=${db:Status-Status}", package]
    return subprocess.run(command, capture_output=True, check=False).stdout == b"installed"


# What every example says on stderr of the refusal that a fake service gives to FULL.
REFUSED = """\
error: the queue is full; try again in 1.5 s
  reason: QUEUE_FULL
  retry_after_s: 1.5
  retry after: 1.5 s
"""

# Java and Ruby read their arguments in the locale's encoding.
UTF8 = {"LC_ALL": "C.UTF-8"}


class Example:
    """One that is built. It is called as its reader would call it."""

    def __init__(self, program: Path) -> None:
        self._program = program

    async def start(self, *args: str, env: Mapping[str, str]) -> Process:
        """The process, its output in pipes."""
        return await asyncio.create_subprocess_exec(
            self._program, *args, stdout=PIPE, stderr=PIPE, env={**os.environ, **UTF8, **env}
        )

    async def run(self, *args: str, env: Mapping[str, str]) -> tuple[int | None, str, str]:
        """Status, stdout and stderr."""
        process = await self.start(*args, env=env)
        out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()


def build(language: Language, directory: Path) -> Example:
    """Builds a copy, so that the checkout stays as it is; skips where the language's packages are not installed."""
    missing = language.missing()
    if missing:
        pytest.skip(f"to build {language.directory}, apt-get install {' '.join(missing)}")
    for part in (Path("protos"), Path("examples", "protos"), language.directory):
        shutil.copytree(ROOT / part, directory / part, ignore=shutil.ignore_patterns("out"))
    built = directory / language.directory
    subprocess.run([built / "build"], check=True, timeout=500)
    return Example(built / language.program)
