"""Lists in the documents that must be whole: what is not built, reasons, settings, log events, decisions."""

import ast
import re
from collections.abc import Iterator

import pytest

from decode_service.config import DecodeConfig
from paceline.core import errors
from paceline.launcher.config import UpConfig
from prefill_service.config import PrefillConfig
from router.config import RouterConfig
from tests.architecture.documents import ROOT, Document, code_in, read
from tests.architecture.names import all_metrics, log_events, tree_of
from tests.architecture.settings import defaults_of

OPERATIONS = read("docs/operations.md")


def test_readme_lists_exactly_what_is_refused_as_not_built() -> None:
    """Each field that the door refuses with NOT_BUILT is in README's list, and nothing else is."""
    assert _fields_in_readme(read("README.md")) == set(_refused_fields())


def test_a_list_that_is_not_whole_is_caught() -> None:
    """A README that names a field which is built differs."""
    readme = read("README.md")
    sentence = "refused with `NOT_BUILT`, never ignored"
    assert sentence in readme.text
    with_more = Document(readme.path, readme.text.replace(sentence, f"{sentence}:\n\n- `sampling.top_k`\n"))
    assert _fields_in_readme(with_more) - _fields_in_readme(readme) == {"sampling.top_k"}


def test_every_reason_is_explained_to_callers() -> None:
    """Each reason of an error class stands in docs/operations.md, and every row there is a reason."""
    reasons = {error.reason for error in _all_errors() if "reason" in vars(error)}
    section = OPERATIONS.section("Errors")
    assert {code_in(cells[1])[0] for cells in section.rows()} == reasons - {"CONFIG", "START"}
    assert reasons <= set(section.spans)


def test_every_reason_is_in_the_drawing_of_the_tree() -> None:
    """The picture at the top of errors.py shows each class, beside the reason that it has."""
    drawing = errors.__doc__ or ""
    for error in _all_errors():
        if not error.__name__.startswith("_"):
            reason = error.reason if "reason" in vars(error) and error is not errors.PacelineError else ""
            assert re.search(rf"{error.__name__}\b.*{reason}", drawing), error.__name__


@pytest.mark.parametrize(
    ("title", "config"),
    [
        ("`./run up`, section `[up]`", UpConfig),
        ("Router, section `[router]`", RouterConfig),
        ("Workers, sections `[prefill]` and `[decode]`", PrefillConfig),
        ("Workers, sections `[prefill]` and `[decode]`", DecodeConfig),
    ],
)
def test_every_setting_is_explained_with_its_default(title: str, config: type) -> None:
    """The table of a service has a row for each setting, and the defaults in it are the real ones."""
    rows = [(code_in(cells[0]), code_in(cells[1])) for cells in OPERATIONS.section(title).rows()]
    defaults = defaults_of(config)
    assert {flag for flags, _ in rows for flag in flags} == set(defaults)
    assert [flags for flags, shown in rows if shown and shown != [defaults[flag] for flag in flags]] == []


def test_every_log_event_is_explained() -> None:
    """docs/operations.md lists exactly the events that the code logs."""
    listed = {event for cells in OPERATIONS.section("Logs").rows() for event in code_in(cells[0])}
    assert listed == log_events()


def test_every_metric_is_explained() -> None:
    """docs/metrics.md lists exactly the metrics that the code names, with kind and labels, and what to do when each moves."""
    metrics = read("docs/metrics.md")
    rows = [cells for title in ("The router's", "A worker's") for cells in metrics.section(title).rows()]
    listed = {(code_in(cells[0])[0], cells[1], tuple(code_in(cells[2]))) for cells in rows}
    assert len(listed) == len(rows)
    assert listed == {(metric.name, metric.kind, metric.labels) for metric in all_metrics()}
    assert [cells[0] for cells in rows if len(cells) != 5 or len(cells[4].split()) < 3] == []


def test_every_decision_is_in_the_list() -> None:
    """docs/decisions/README.md links each record, and the records have the headings that it asks for."""
    records = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    links = read("docs/decisions/README.md").links
    assert [record.name for record in records] == links
    for record in records:
        text = record.read_text(encoding="utf-8")
        headings = re.findall(r"^\*\*([\w ]+)\.\*\*", text, re.MULTILINE)
        assert headings == ["Context", "Decision", "Chosen against", "Consequences"], record.name
        assert text.startswith(f"# {int(record.name[:4])}. "), record.name


def _fields_in_readme(readme: Document) -> set[str]:
    """The list behind the sentence about them, if there is one; a constant in it only says which values are meant."""
    section = readme.section("What does not exist yet").text
    listed = re.search(r"never ignored:\n\n((?:- .*\n)+)", section)
    return {span for span in code_in(listed[1]) if span != span.upper()} if listed else set()


def _refused_fields() -> Iterator[str]:
    for node in ast.walk(tree_of(ROOT / "paceline" / "runtime" / "wire.py")):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "NotBuiltError":
            field = node.args[0]
            assert isinstance(field, ast.Constant), "the field's name is written out"
            yield str(field.value)


def _all_errors() -> list[type[errors.PacelineError]]:
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    return [each for each in classes if issubclass(each, errors.PacelineError)]
