"""Rules and dashboard ask for what the processes export: metrics, labels and reasons that exist."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from paceline.core import errors
from paceline.core.request import FinishReason
from tests.architecture.names import all_metrics, log_events
from tests.compose.files import COMPOSE

# Prometheus adds these to what it reads.
ADDED_LABELS = {"instance", "job"}
# Grafana puts a time in here before Prometheus sees it.
GRAFANAS_OWN = re.compile(r"\$__\w+")
_METRIC = re.compile(r"paceline_\w+")
_SELECTOR = re.compile(r"(paceline_\w+|up)\{([^}]*)\}")
_GROUPED = re.compile(r"\bby \(([^)]*)\)")
_MATCHER = re.compile(r"""(\w+)(=~|!~|!=|=)"([^"]*)\"""")


def series() -> dict[str, set[str]]:
    """Every series that our processes export, with its labels."""
    found: dict[str, set[str]] = {}
    for metric in all_metrics():
        labels = {*metric.labels, *ADDED_LABELS}
        if metric.kind == "histogram":
            found |= {f"{metric.name}_{part}": labels for part in ("sum", "count")}
            found[f"{metric.name}_bucket"] = {*labels, "le"}
        else:
            found[metric.name] = labels
    return found


def complaints(expression: str) -> list[str]:
    """What an expression asks for that nobody exports; empty for a good one."""
    known = series()
    named = _METRIC.findall(re.sub(r'"[^"]*"', '""', expression))
    found = [f"{name}: no such series" for name in named if name not in known]
    shared = set.union(ADDED_LABELS, *(known.get(name, set()) for name in named))
    found += [f"{name}: no series has it" for name in _grouping(expression) if name not in shared]
    for name, selector in _SELECTOR.findall(expression):
        labels = {label for label, _, _ in _MATCHER.findall(selector)}
        found += [f"{name} has no {label}" for label in labels - known.get(name, ADDED_LABELS)]
    return found


def _grouping(expression: str) -> Iterator[str]:
    for group in _GROUPED.findall(expression):
        yield from (label.strip() for label in group.split(","))


def rules() -> list[dict[str, Any]]:
    """The alerts."""
    groups = yaml.safe_load((COMPOSE / "prometheus" / "rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """The dashboard's, rows left out."""
    dashboard = json.loads((COMPOSE / "grafana" / "paceline.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    """All of both."""
    return [rule["expr"] for rule in rules()] + [
        each["expr"] for panel in panels() for each in panel["targets"]
    ]


@pytest.mark.parametrize("expression", expressions())
def test_what_is_asked_for_is_exported(expression: str) -> None:
    """Each series exists, and so does each label that it is chosen or grouped by."""
    assert complaints(expression) == []


@pytest.mark.parametrize("expression", expressions())
def test_prometheus_would_parse_what_is_asked(expression: str) -> None:
    """A real parser of its language takes each, and knows what to make of each part of it."""
    promql_parser.parse(GRAFANAS_OWN.sub("5m", expression))


@pytest.mark.parametrize(
    "expression", ["sum(rate(paceline_workers[5m])", "rate(paceline_workers)", "paceline_workers{tier=}"]
)
def test_what_does_not_parse_is_noticed(expression: str) -> None:
    """The check above can fail: on brackets, on a function of a range that is given a value, on a selector."""
    with pytest.raises(ValueError, match=r"."):
        promql_parser.parse(expression)


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("rate(paceline_breakaways_total[5m])", "paceline_breakaways_total: no such series"),
        ("paceline_ttft_seconds", "paceline_ttft_seconds: no such series"),
        ("sum by (rider) (paceline_workers)", "rider: no series has it"),
        ('paceline_workers{priority="standard"}', "paceline_workers has no priority"),
    ],
)
def test_what_is_not_exported_is_noticed(expression: str, complaint: str) -> None:
    """The check above can fail, for a name, a histogram without its part, and a label."""
    assert complaints(expression) == [complaint]


def test_alerts_name_ends_that_requests_can_have() -> None:
    """Each value of `end` is a reason of an error, or a way to finish."""
    reasons = {error.reason for error in vars(errors).values() if hasattr(error, "reason")}
    finishes = {reason.name.lower() for reason in FinishReason}
    ends = {
        end
        for expression in expressions()
        for _, selector in _SELECTOR.findall(expression)
        for label, _, values in _MATCHER.findall(selector)
        if label == "end"
        for end in values.split("|")
    }
    assert ends
    assert ends <= reasons | finishes


def test_alerts_say_what_to_do() -> None:
    """Each has a name of its own, what is the matter, and what to do; the log events that it names exist."""
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "action"}
        events = re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", rule["annotations"]["action"])
        assert set(events) <= log_events() | {"max_num_seqs"}, rule["alert"]


def test_panels_do_not_lie_on_each_other() -> None:
    """Each has a number and a place of its own, and asks the source that is provisioned."""
    (source,) = yaml.safe_load((COMPOSE / "grafana" / "source.yaml").read_text())["datasources"]
    places = [tuple(panel["gridPos"].values()) for panel in panels()]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in panels()})
    assert {panel["datasource"]["uid"] for panel in panels()} == {source["uid"]}


needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@needs_promtool
def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    """Where promtool is, it says so; and one that is no rule it does not take."""
    rules_file = COMPOSE / "prometheus" / "rules.yaml"
    assert promtool("check", "rules", rules_file) == 0
    broken = tmp_path / "rules.yaml"
    broken.write_text(rules_file.read_text().replace("for: 1m", "for: 1 minute", 1))
    assert promtool("check", "rules", broken) != 0


@needs_promtool
@pytest.mark.parametrize("file", ["prometheus/prometheus.yaml", "k8s/monitoring/prometheus.yaml"])
def test_prometheus_takes_its_configuration(file: str, tmp_path: Path) -> None:
    """Where promtool is, it takes what we give Prometheus to read; Debian's knows nothing of Kubernetes, whose part is left out for it."""
    content = yaml.safe_load((COMPOSE / file).read_text())
    for job in content["scrape_configs"]:
        job.pop("kubernetes_sd_configs", None)
    here = tmp_path / "prometheus.yaml"
    here.write_text(yaml.safe_dump(content))
    assert promtool("check", "config", "--syntax-only", here) == 0


def promtool(*arguments: str | Path) -> int:
    """Its exit status; what it says is shown where a test fails."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    sys.stdout.write(done.stdout + done.stderr)
    return done.returncode
