"""One line for each event on standard error: time, level, room, text. Standard output stays free for the ready line."""

import logging
import re
import sys
from collections.abc import Sequence

# What would end a line, or move on a terminal; names that clients choose come into messages as they are.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MAX_MESSAGE = 8 * 1024
_PLAIN = logging.Formatter()


def one_line(record: logging.LogRecord) -> bool:
    """A filter of the handler: whatever is in a message, its event is one line; lines of a traceback stand indented."""
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
    """From now on; `warnings` are what was to be said before there was a log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    handler.addFilter(one_line)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(level)
    # Their INFO repeats each request.
    for chatty in ("botocore", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # It warns each time that a job is due while it still runs.
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
    for text in warnings:
        logging.getLogger("neve").warning("%s", text)
