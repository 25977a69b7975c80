"""Wake-up of waiting requests: after a new message, a change of a topic or a group, and at shutdown.

RocketMQ's NotifyMessageArrivingListener. There are two lists of waiting requests, because a message affects them
differently. A pull does not consume the message, so a message resumes every pull with a matching filter
(`pull_request_hold`). A pop locks the message, so a message wakes only one pop of each consumer group
(`pop_long_polling`).
"""

import asyncio
from collections.abc import Iterable

from broker.long_polling.pop_long_polling import PopLongPolling
from broker.long_polling.pull_request_hold import PullRequestHold
from broker.store.visibility import VisibleEntry
from infra.loop.supervisor import Faults


class MessageArriving:
    """Dispatcher of arrivals to waiting pulls and pops; called by the store, by topic deletion and at shutdown."""

    def __init__(self, hold: PullRequestHold, polling: PopLongPolling, faults: Faults) -> None:
        self._hold, self._polling, self._faults = hold, polling, faults

    def appended(self, shown: Iterable[VisibleEntry]) -> None:
        """Wake the requests that wait for these visible entries.

        Exceptions go to `faults`: the messages are already stored and confirmed, so the caller must not fail.
        """
        if self._hold.count or self._polling.count:
            try:
                self._notify(shown)
            except Exception as error:  # noqa: BLE001 - waiting requests time out and poll again
                self._faults.add("waiting requests", error)

    def _notify(self, shown: Iterable[VisibleEntry]) -> None:
        hold, polling = self._hold, self._polling
        for queue, queue_offset, tags_code in shown:
            polling.arrived(queue.topic, queue.queue_id)
            if hold.arrived(queue.topic, queue.queue_id, queue_offset, tags_code) and not hold.wake_scheduled:
                hold.wake_scheduled = True
                asyncio.get_running_loop().call_soon(hold.wake)

    def release_topic(self, topic: str) -> None:
        """Make every request that waits for the topic read again, after the topic was deleted or changed."""
        self._hold.release_topic(topic)
        self._polling.release_topic(topic)

    def release_group(self, group: str, topic: str) -> None:
        """Make the requests of the group read again, after its offset was reset."""
        self._hold.release_topic(topic)
        self._polling.wake_group(group, topic)

    def check_all(self) -> None:
        """Make every request read again, after a change of what the broker serves, such as its role.

        A pull that finds nothing waits again.
        """
        self._hold.check_all()
        self._polling.release_all()

    def release_all(self) -> None:
        """End every wait, at shutdown."""
        self._hold.release_all()
        self._polling.release_all()
