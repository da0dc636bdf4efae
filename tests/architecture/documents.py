"""Reads the Markdown documents: what they cite as code, which files they link to, what their tables list."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Document:
    """A Markdown file; `path` is where it lies, or would lie."""

    path: Path
    text: str

    @property
    def prose(self) -> str:
        """Everything but the code blocks."""
        return _BLOCK.sub("", self.text)

    @property
    def spans(self) -> list[str]:
        """What stands between backticks in the prose."""
        return _SPAN.findall(self.prose)

    def blocks(self, language: str | None = None) -> list[str]:
        """The code blocks, of one language or all."""
        return [code for kind, code in _BLOCK.findall(self.text) if language in (None, kind)]

    @property
    def links(self) -> list[str]:
        """Where the links go, those to the web left out."""
        return [link for link in _LINK.findall(self.prose) if not link.startswith(("http:", "https:"))]

    @property
    def anchors(self) -> set[str]:
        """What a link into this document may name, as GitHub makes it out of the headings."""
        return {
            re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in _HEADING.findall(self.prose)
        }

    def section(self, title: str) -> "Document":
        """The part under one heading, up to the next of any depth."""
        _, heading, rest = self.text.partition(f"# {title}\n")
        assert heading, f"{self.path.name} has no section {title!r}"
        return Document(self.path, re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0])

    def rows(self) -> Iterator[list[str]]:
        """The cells of all table rows, heads and rules left out."""
        for table in re.findall(r"(?:^\|.*\n)+", self.prose + "\n", re.MULTILINE):
            for line in table.splitlines()[2:]:
                yield [cell.strip() for cell in line.strip("|").split("|")]


def code_in(text: str) -> list[str]:
    """The code spans of a piece of text."""
    return _SPAN.findall(text)


def read(path: str) -> Document:
    """A document of this repository."""
    return Document(ROOT / path, (ROOT / path).read_text(encoding="utf-8"))


def all_documents() -> list[Document]:
    """Every document that speaks about the code."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return [read(str(path.relative_to(ROOT))) for path in sorted(paths)]
