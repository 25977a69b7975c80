"""Logging to standard error, one line for each event: time, level, module, text."""

import logging
import re
import sys
from collections.abc import Sequence

# Characters that end a line or control a terminal. Messages contain names that clients choose.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MAX_MESSAGE = 8 * 1024
_PLAIN = logging.Formatter()


def one_line(record: logging.LogRecord) -> bool:
    """A filter of the handler: escape control characters, so that each event is one line; indent tracebacks."""
    record.msg, record.args = _escaped(record.getMessage()[:_MAX_MESSAGE]), ()
    if record.exc_info and not record.exc_text:
        lines = _PLAIN.formatException(record.exc_info).split("\n")
        record.exc_text = "\n".join("  " + _escaped(line) for line in lines)
    return True


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def set_level(level: str) -> None:
    """Log events of this level and above from now on."""
    logging.getLogger().setLevel(level)


def configure(level: str = "INFO", warnings: Sequence[str] = ()) -> None:
    """Set up logging, and log `warnings`, which occurred before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    handler.addFilter(one_line)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(level)
    # At INFO they log every request.
    for chatty in ("botocore", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # At WARNING it logs each job that is due while it still runs.
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
    for text in warnings:
        logging.getLogger("neve").warning("%s", text)
