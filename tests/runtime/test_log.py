"""Structured logs."""

import asyncio
import gc
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from paceline.core.errors import ConfigError
from paceline.runtime.log import configure_logging, get_logger
from paceline.runtime.server import run_service


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Logging is a setting of the process: puts it back."""
    grpc = logging.getLogger("grpc")
    before = grpc.handlers, grpc.propagate
    yield
    grpc.handlers, grpc.propagate = before
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


def test_who_knows_prompts_does_not_quote_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    """Of an exception that is not ours its kind and its lines are logged, also inside a group; ours speaks for itself."""
    configure_logging("router", "router-0", "info", knows_text=True)

    def look_up(word: str) -> None:
        try:
            json.loads("{}")[word]
        except KeyError as error:
            error.add_note("secret too")
            raise ExceptionGroup(
                "secret", [ValueError("secret"), ConfigError("--model is missing")]
            ) from error

    try:
        look_up("my secret question")
    except ExceptionGroup:
        get_logger().exception("request_failed")
    err = capsys.readouterr().err
    assert "secret" not in err
    for shown in ("KeyError", "ValueError", "--model is missing", "test_log.py"):
        assert shown in err


def test_what_nobody_handles_and_what_grpc_says_are_events(capsys: pytest.CaptureFixture[str]) -> None:
    """In the same form, and without the words either."""
    configure_logging("router", "router-0", "info", knows_text=True)

    async def main(stop: asyncio.Event) -> None:
        """Leaves a task alone that fails."""

        async def fail() -> None:
            """Quotes."""
            raise ValueError("my secret question")

        task = asyncio.create_task(fail())
        await asyncio.wait({task})
        del task
        gc.collect()
        try:
            int("my secret question")
        except ValueError:
            logging.getLogger("grpc._cython.cygrpc").exception("Unexpected [%s]", "my secret question")

    assert run_service(main) == 0
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["task_failed", "library_warning"]
    assert [line["exception"][0]["exc_type"] for line in lines] == ["ValueError"] * 2
    assert "secret" not in str(lines)


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
