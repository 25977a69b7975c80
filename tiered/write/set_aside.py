"""Topics that jobs skip because their local files can't be read, so that one topic does not stop the others.

A topic is logged when it becomes unreadable and when it is readable again. Each look tries it again. Meanwhile its
messages are not archived or expired, and their segments are not evicted.
"""

from __future__ import annotations

import logging
from collections.abc import Container

log = logging.getLogger(__name__)


class SetAside:
    """The skipped topics of a job. Written by one thread at a time, read by any."""

    def __init__(self, what: str) -> None:
        """`what`: what the job does with topics, for the log lines."""
        self._what = what
        self._reasons: dict[str, str] = {}

    def note(self, topic: str, error: Exception) -> None:
        reason = str(error)
        if self._reasons.get(topic) != reason:
            log.error("topic %s can't be %s and is quarantined: %s", topic, self._what, reason)
        self._reasons[topic] = reason

    def clear(self, topic: str) -> None:
        """Note that the topic was processed, or that nothing was due."""
        if self._reasons.pop(topic, None) is not None:
            log.info("topic %s is %s again", topic, self._what)

    def keep(self, existing: Container[str]) -> None:
        """Drop topics that no longer exist."""
        for topic in [topic for topic in self._reasons if topic not in existing]:
            self._reasons.pop(topic, None)

    def reasons(self) -> dict[str, str]:
        return dict(self._reasons)
