"""Structured logs: one JSON object a line on stderr. Events have fields; prompts and outputs are never among them."""

import logging
import sys

import structlog


def configure_logging(service: str, worker_id: str, level: str) -> None:
    """Sets the format for the whole process and binds who is speaking."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            # Without local variables, as structlog would have it: they hold prompts.
            structlog.processors.ExceptionRenderer(
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            ),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, worker=worker_id)


def get_logger() -> structlog.stdlib.BoundLogger:
    """A logger; call it with an event name and fields: `log.info("prefill_done", num_tokens=512)`."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger()
    return logger
