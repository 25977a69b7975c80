"""One line for each event on standard error: time, level, room, text. Standard output stays free for the ready line."""

import logging
import sys


def configure(level: str = "INFO") -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # Their INFO repeats each request.
    for chatty in ("botocore", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # It tells each run that waits for a long one, and each failure, which our scheduler tells once.
    logging.getLogger("apscheduler").setLevel(logging.CRITICAL)
