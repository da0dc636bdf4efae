"""Structured logs: one JSON object a line on stderr. Events have fields; prompts and outputs are never among them."""

import logging
import sys
from types import TracebackType
from typing import Any

import structlog
import structlog.tracebacks

from paceline.core import errors

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]
# Without local variables: those hold prompts.
_FRAMES = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
# Whose words are ours, and never hold a prompt.
_OURS = frozenset(name for name, value in vars(errors).items() if isinstance(value, type))
_HIDDEN = "(not shown: it may quote a prompt)"


def configure_logging(service: str, worker_id: str, level: str, *, knows_text: bool = False) -> None:
    """Sets the format for the whole process and binds who is speaking.

    A process that `knows_text` of prompts does not log the words of exceptions that are not its own: a library may quote what it
    was given.
    """
    tracebacks = structlog.processors.ExceptionRenderer(_without_words if knows_text else _FRAMES)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            tracebacks,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, worker=worker_id)
    _take_over("grpc")


def get_logger() -> structlog.stdlib.BoundLogger:
    """A logger; call it with an event name and fields: `log.info("prefill_done", num_tokens=512)`."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger()
    return logger


log = get_logger()


def on_unhandled(_: object, context: dict[str, Any]) -> None:
    """In place of asyncio's own handler, which shows the exception's words whoever raised it."""
    log.error("task_failed", what=context.get("message"), exc_info=context.get("exception"))


class _Events(logging.Handler):
    """What a library tells Python's own logging, as an event: its sentence, without what it would fill in."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        log.warning("library_warning", library=record.name, what=str(record.msg), exc_info=record.exc_info)


def _take_over(library: str) -> None:
    logger = logging.getLogger(library)
    logger.handlers, logger.propagate = [_Events(logging.WARNING)], False


def _without_words(exc_info: _ExcInfo) -> list[dict[str, Any]]:
    stacks = _FRAMES(exc_info)
    _hide_words(stacks)
    return stacks


def _hide_words(stacks: list[dict[str, Any]]) -> None:
    for stack in stacks:
        if stack["exc_type"] not in _OURS:
            stack["exc_value"], stack["exc_notes"] = _HIDDEN, []
        for group in stack.get("exceptions") or ():
            _hide_words(group)
