"""Finds what a document cites that is not there. Each function gives complaints; a true document gives none."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

from tests.architecture.documents import ROOT, Document
from tests.architecture.names import names_in, vocabulary

# Names of other people's code, and words of gRPC and JSON, that documents speak of.
FOREIGN = frozenset(
    {
        "AutoModelForCausalLM",
        "AttentionInterface",
        "position_ids",
        "google.rpc.ErrorInfo",
        "google.rpc.RetryInfo",
        "grpc.health.v1",
        "ssl_ca_certs",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_cert_reqs",
        "ssl_check_hostname",
        "GRPC_TRACE",
        "custom.metrics.k8s.io",
        "registry.example",
    }
)
FOREIGN_FLAGS = frozenset(
    {
        "--help",
        "--index-url",
        # docker and docker compose
        "--build-arg",
        "--target",
        "--detach",
        "--force-recreate",
        "--no-deps",
        "--profile",
        "--wait",
        # kubectl
        "--from-file",
        "--from-literal",
        "--raw",
        # optimum-cli
        "--weight-format",
    }
)

_PATH = re.compile(r"[\w.][\w.-]*(/[\w.-]+)*/?")
_FILE_ENDINGS = (".py", ".md", ".toml", ".txt", ".proto", ".sh", ".mjs", ".json")
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_PLACED_NAME = re.compile(r"`([\w/]+\.py)`\s+`([\w.]+)`")
_DOTTED_IN_DRAWING = re.compile(r"\b[A-Z]\w+\.[A-Z]\w+\b")


def missing_paths(document: Document) -> list[str]:
    """Files and directories that are cited and do not exist."""
    cited = [span for span in document.spans if _looks_like_path(span)]
    return [f"{span}: no such file" for span in cited if not (ROOT / span).exists()]


def missing_names(document: Document) -> list[str]:
    """Classes, functions, fields, constants and modules that are cited and are nowhere in the code."""
    cited = [span.removesuffix("()") for span in document.spans if _looks_like_name(span.removesuffix("()"))]
    cited += [name for block in document.blocks("mermaid") for name in _DOTTED_IN_DRAWING.findall(block)]
    return [f"{name}: no such name" for name in cited if not _is_known(name)]


def misplaced_names(document: Document) -> list[str]:
    """Names that stand right behind a path and are not in that file."""
    placed = _PLACED_NAME.findall(document.prose)
    return [
        f"{path} {name}: not in that file"
        for path, name in placed
        if not (ROOT / path).is_file() or name not in _names_and_members(ROOT / path)
    ]


def missing_imports(document: Document) -> list[str]:
    """What Python examples import from us and we do not have."""
    imports = [
        node
        for block in document.blocks("python")
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline")
    ]
    return [
        f"{node.module} has no {alias.name}"
        for node in imports
        for alias in node.names
        if f"{node.module}.{alias.name}" not in vocabulary()
        and alias.name not in _names_of_module(node.module or "")
    ]


def broken_links(document: Document) -> list[str]:
    """Links to files or headings of ours that are not there."""
    return [f"{link}: leads nowhere" for link in document.links if not _resolves(document, link)]


def unknown_commands(document: Document, commands: frozenset[str]) -> list[str]:
    """`./run` commands that the script does not have."""
    code = "\n".join([*document.spans, *document.blocks()])
    return [f"./run {word}: no such command" for word in _run_words(code) if word not in commands]


def unknown_flags(document: Document, flags: frozenset[str]) -> list[str]:
    """Options that none of our programs takes."""
    code = "\n".join([*document.spans, *document.blocks()])
    cited = re.findall(r"(?<![\w-])--[a-z][\w-]*", code)
    return [f"{flag}: no such option" for flag in cited if flag not in flags | FOREIGN_FLAGS]


def document_checks() -> tuple[Callable[[Document], list[str]], ...]:
    """The checks that need nothing but the document."""
    return (missing_paths, missing_names, misplaced_names, missing_imports, broken_links)


def _looks_like_path(span: str) -> bool:
    return bool(_PATH.fullmatch(span)) and ("/" in span or span.endswith(_FILE_ENDINGS))


def _looks_like_name(span: str) -> bool:
    """Plain lower-case words (`torch`, `host`) may be anything and are left alone."""
    if not _NAME.fullmatch(span) or span.endswith(_FILE_ENDINGS):
        return False
    return "." in span or "_" in span or span != span.lower()


def _is_known(name: str) -> bool:
    if name in FOREIGN or name in vocabulary():
        return True
    owner, _, member = name.rpartition(".")
    # A field's path in a request, such as sampling.top_p: each part is a field.
    return bool(owner) and owner == owner.lower() and {member, *owner.split(".")} <= vocabulary()


def _names_and_members(path: Path) -> set[str]:
    names = names_in(path)
    return {*names, *(name.rpartition(".")[2] for name in names)}


def _names_of_module(module: str) -> frozenset[str]:
    path = ROOT / (module.replace(".", "/") + ".py")
    return names_in(path) if path.is_file() else frozenset()


def _resolves(document: Document, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = (document.path.parent / file).resolve() if file else document.path
    if not target.exists() and target != document.path:
        return False
    if not anchor:
        return True
    there = document if target == document.path else Document(target, target.read_text(encoding="utf-8"))
    return anchor in there.anchors


def _run_words(code: str) -> list[str]:
    return re.findall(r"\./run +([a-z]\w*)", code)
