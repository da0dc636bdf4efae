"""What the documents name exists: files, code, links, commands, options. And each check can fail."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import tune
from benchmarks.roofline import command as roofline
from benchmarks.serve import flags as serve_flags
from benchmarks.simulator import cli as simulator_cli
from decode_service.config import DecodeConfig
from paceline import cli, health
from paceline.launcher.config import UpConfig
from paceline.launcher.fetch import make_parser as make_fetch_parser
from paceline.runtime.config import read_section
from prefill_service.config import PrefillConfig
from router.config import RouterConfig
from tests.architecture.citations import document_checks, unknown_commands, unknown_flags
from tests.architecture.documents import ROOT, Document, all_documents
from tests.architecture.settings import flags_of

DOCUMENTS = all_documents()
SECTIONS: dict[str, type] = {
    "up": UpConfig,
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}
Check = Callable[[Document], list[str]]


@pytest.fixture(scope="module")
def commands() -> frozenset[str]:
    """What `./run` takes: the words of the case in its main function."""
    main = (ROOT / "run").read_text(encoding="utf-8").partition("case $command in")[2].partition("esac")[0]
    return frozenset(
        word for labels in re.findall(r"^ +([a-z |-]+)\)", main, re.MULTILINE) for word in labels.split(" | ")
    )


@pytest.fixture
def flags(capsys: pytest.CaptureFixture[str]) -> frozenset[str]:
    """Every option of the services, of the launcher, of the command lines and of the script."""
    texts = [(ROOT / "run").read_text(encoding="utf-8")]
    for command in ("generate", "chat"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        texts.append(capsys.readouterr().out)
    parsers = (
        simulator_cli.make_parser(),
        tune.make_parser(),
        serve_flags.make_parser(),
        roofline.make_parser(),
        health.make_parser(),
        make_fetch_parser(),
    )
    texts += [parser.format_help() for parser in parsers]
    found = {flag for text in texts for flag in re.findall(r"--[a-z][\w-]*", text)}
    return frozenset(found.union(*(flags_of(config) for config in SECTIONS.values()), ["--config"]))


@pytest.mark.parametrize("check", document_checks())
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.path.relative_to(ROOT)))
def test_what_a_document_cites_exists(document: Document, check: Check) -> None:
    """Every file, name, import and link of every document is there."""
    assert check(document) == []


@pytest.mark.parametrize(
    ("check", "text"),
    list(
        zip(
            document_checks(),
            (
                "see `router/nowhere.py`",
                "the class `Peloton.ride` and `breakaway_s`",
                "`router/service.py` `Dispatcher.run` is in another file",
                "```python\nfrom paceline.client import Peloton\n```\n",
                "[one](docs/nowhere.md)",
            ),
            strict=True,
        )
    ),
)
def test_a_document_that_lies_is_caught(check: Check, text: str) -> None:
    """Each check complains about what is not there."""
    assert check(Document(ROOT / "sample.md", text)) != []


def test_a_link_to_a_missing_heading_is_caught() -> None:
    """A link into a document must name a heading that it has."""
    sample = Document(ROOT / "sample.md", "# A title\n[good](#a-title) [bad](README.md#nowhere)")
    *_, broken_links = document_checks()
    assert broken_links(sample) == ["README.md#nowhere: leads nowhere"]


def test_a_name_that_only_a_drawing_has_is_caught() -> None:
    """Calls that a sequence diagram names exist too."""
    _, missing_names, *_ = document_checks()
    sample = (
        "```mermaid\nrouter->>worker: DecodeService.Ride\nclient->>router: InferenceService.Generate\n```\n"
    )
    assert missing_names(Document(ROOT / "sample.md", sample)) == ["DecodeService.Ride: no such name"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.path.relative_to(ROOT)))
def test_commands_and_options_exist(
    document: Document, commands: frozenset[str], flags: frozenset[str]
) -> None:
    """`./run` has every command, and some program of ours every option, that a document names."""
    assert unknown_commands(document, commands) == []
    assert unknown_flags(document, flags) == []


def test_an_unknown_command_or_option_is_caught(commands: frozenset[str], flags: frozenset[str]) -> None:
    """The same checks fail on what does not exist, and know what does."""
    sample = Document(ROOT / "sample.md", "`./run uphill --topology 1P1D --gears`")
    assert unknown_commands(sample, commands) == ["./run uphill: no such command"]
    assert unknown_flags(sample, flags) == ["--gears: no such option"]
    assert commands >= {"up", "generate", "chat", "help"}


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if each.blocks("toml")], ids=str)
def test_a_config_file_that_a_document_shows_is_taken(document: Document, tmp_path: Path) -> None:
    """Each section of an example is one of ours, and holds settings that it has."""
    for number, block in enumerate(document.blocks("toml")):
        file = tmp_path / f"{number}.toml"
        file.write_text(block, encoding="utf-8")
        sections = re.findall(r"^\[(\w+)\]", block, re.MULTILINE)
        assert sections
        for section in sections:
            assert read_section(SECTIONS[section], file, section)
