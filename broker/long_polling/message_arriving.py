"""Tells those who wait that there is something: a message, another state of a topic, the broker's end.

They wait in two lists, for a message means two things to them. A pull gets a copy: it answers every pull that it fits
(`pull_request_hold`). A pop takes: it wakes one of each group (`pop_long_polling`).
"""

import asyncio
from collections.abc import Iterable

from broker.long_polling.pop_long_polling import PopLongPolling
from broker.long_polling.pull_request_hold import PullRequestHold
from broker.store.visibility import VisibleEntry
from infra.loop.supervisor import Faults


class MessageArriving:
    """Told by the store, by who deletes a topic, and by the broker's stop."""

    def __init__(self, hold: PullRequestHold, polling: PopLongPolling, faults: Faults) -> None:
        self._hold, self._polling, self._faults = hold, polling, faults

    def appended(self, shown: Iterable[VisibleEntry]) -> None:
        """What is stored and confirmed is so whatever happens here."""
        if self._hold.count or self._polling.count:
            try:
                self._tell(shown)
            except Exception as error:  # noqa: BLE001 - who waits asks again by themselves
                self._faults.add("who waits for messages", error)

    def _tell(self, shown: Iterable[VisibleEntry]) -> None:
        hold, polling = self._hold, self._polling
        for queue, queue_offset, tags_code in shown:
            polling.arrived(queue.topic, queue.queue_id)
            if hold.arrived(queue.topic, queue.queue_id, queue_offset, tags_code) and not hold.wake_scheduled:
                hold.wake_scheduled = True
                asyncio.get_running_loop().call_soon(hold.wake)

    def release_topic(self, topic: str) -> None:
        """It is gone, or other than it was: everyone who waits for it looks again."""
        self._hold.release_topic(topic)
        self._polling.release_topic(topic)

    def release_group(self, group: str, topic: str) -> None:
        """Somebody set it elsewhere: it looks there."""
        self._hold.release_topic(topic)
        self._polling.wake_group(group, topic)

    def look_again(self) -> None:
        """What this broker says has changed: everyone asks again, and waits again where there is nothing."""
        self._hold.look_again()
        self._polling.release_all()

    def release_all(self) -> None:
        """The broker ends: nobody waits any more."""
        self._hold.release_all()
        self._polling.release_all()
