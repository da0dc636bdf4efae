"""Structured logs."""

import json
from collections.abc import Iterator

import pytest
import structlog

from paceline.runtime.log import configure_logging, get_logger


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Logging is a setting of the process: puts it back."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_an_event_is_one_line_of_json_with_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """Who speaks, what happened, and the facts; on stderr, so that stdout stays free for answers."""
    configure_logging("router", "router-0", "info")
    get_logger().info("request_done", num_output_tokens=3)
    out, err = capsys.readouterr()
    assert out == ""
    line = json.loads(err)
    assert line["event"] == "request_done"
    assert line["level"] == "info"
    assert (line["service"], line["worker"], line["num_output_tokens"]) == ("router", "router-0", 3)


def test_less_than_the_level_is_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    """Below the level there is silence, at the level there is a line."""
    configure_logging("router", "router-0", "warning")
    get_logger().info("quiet")
    get_logger().warning("loud")
    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["loud"]


def test_a_traceback_shows_where_and_no_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines of code are there; the values of variables, among them prompts, are not."""

    def handle(prompt: str) -> None:
        words = prompt.split()
        raise ValueError(f"cannot handle {len(words)} words")

    configure_logging("router", "router-0", "info")
    try:
        handle("my secret question")
    except ValueError:
        get_logger().exception("request_failed")
    err = capsys.readouterr().err
    assert "cannot handle 3 words" in err
    assert "test_log.py" in err
    assert "secret" not in err
