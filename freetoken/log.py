"""Logging: one stream, one format, the request's id where there is one. Knows nothing of who logs
or why.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from typing import TextIO

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="-")
"""Set by the server for the length of a request; every record made inside it carries the id."""

FORMAT = "%(asctime)s.%(msecs)03d %(levelname).1s %(name)s [%(request_id)s] %(message)s"


class _StampRequest(logging.Filter):
    """Puts the current request's id into each record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = REQUEST_ID.get()
        return True


def configure(level: str = "info", stream: TextIO | None = None) -> None:
    """Send everything under `freetoken`, and warnings of other libraries, to `stream` (stderr).
    Calling again replaces.

    Raises ValueError for an unknown level.
    """
    names = logging.getLevelNamesMapping()
    if level.upper() not in names:
        known = ", ".join(name.lower() for name in names)
        raise ValueError(f"expected a log level out of {known}, got {level!r}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    handler.addFilter(_StampRequest())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("freetoken").setLevel(names[level.upper()])
