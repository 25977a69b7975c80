"""Topics that jobs leave out because what the log holds of them can't be read: one must not stop the others.

Each is told when it is set aside and when it is back, and is tried again at each look. Meanwhile nothing of it is
archived or expired, and the segments that hold its messages stay.
"""

from __future__ import annotations

import logging
from collections.abc import Container

log = logging.getLogger(__name__)


class SetAside:
    """Written by one job at a time; read from any thread."""

    def __init__(self, what: str) -> None:
        """`what` the job does with topics, for the log."""
        self._what = what
        self._reasons: dict[str, str] = {}

    def note(self, topic: str, error: Exception) -> None:
        reason = str(error)
        if self._reasons.get(topic) != reason:
            log.error("topic %s can't be %s and is set aside: %s", topic, self._what, reason)
        self._reasons[topic] = reason

    def clear(self, topic: str) -> None:
        """It went well, or there is nothing to do for it."""
        if self._reasons.pop(topic, None) is not None:
            log.info("topic %s is %s again", topic, self._what)

    def keep(self, existing: Container[str]) -> None:
        """Forget topics that are gone."""
        for topic in [topic for topic in self._reasons if topic not in existing]:
            self._reasons.pop(topic, None)

    def reasons(self) -> dict[str, str]:
        return dict(self._reasons)
