"""Queue assignment that pop clients leave to the broker, and the request mode (pull or pop) of topics and groups."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from broker.tables.changes import Change, ModePut
from broker.tables.journal import NO_JOURNAL, Journal
from broker.tables.state_file import StateFile, SyncLog
from infra.disk.filesystem import Disk
from infra.loop.parts import Parts, run_here
from infra.loop.threads import SYSTEM_THREADS, Threads
from neve.remoting.body import MessageQueue

PULL, POP = "PULL", "POP"
_SHAPE = dict[str, dict[str, dict[str, Any]]]
AVERAGE, BY_CIRCLE = "AVG", "AVG_BY_CIRCLE"


def share(strategy: str, client: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> list[MessageQueue]:
    """Return the queues of one client by a strategy of RocketMQ clients.

    An unregistered client gets none. Raises ValueError for an unknown strategy.
    """
    if strategy not in (AVERAGE, BY_CIRCLE):
        raise ValueError(f"unsupported strategy {strategy}")
    if client not in clients or not queues:
        return []
    index, count = clients.index(client), len(clients)
    if strategy == BY_CIRCLE:
        return list(queues[index::count])
    size, more = divmod(len(queues), count)
    start = index * size + min(index, more)
    return list(queues[start : start + size + (1 if index < more else 0)])


def share_for_pop(
    strategy: str, client: str, queues: Sequence[MessageQueue], clients: Sequence[str], neighbours: int
) -> list[MessageQueue]:
    """Return the queues that a client may pop from: all queues, or its own and those of its neighbours.

    Queue -1 denotes all queues of a topic on a broker. `neighbours` is RocketMQ's popShareQueueNum: the number of
    clients after this one whose queues are added. Zero or less means all queues, and so does a number that covers all.
    """
    if neighbours <= 0 or neighbours >= len(clients) - 1:
        brokers = sorted({(queue.topic, queue.broker_name) for queue in queues})
        return [MessageQueue(topic, broker, -1) for topic, broker in brokers]
    if client not in clients:
        return []
    index = clients.index(client)
    if len(clients) > len(queues):
        return [queues[index % len(queues)]] if queues else []
    parts = (clients[(index + step) % len(clients)] for step in range(neighbours + 1))
    return [queue for part in parts for queue in share(strategy, part, queues, clients)]


class RequestModes:
    """Request mode (pull or pop) of each topic and group (RocketMQ's MessageRequestModeManager).

    Groups without a stored mode pull.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        threads: Threads = SYSTEM_THREADS,
        journal: Journal = NO_JOURNAL,
        sync_log: SyncLog | None = None,
    ) -> None:
        self._modes: dict[str, dict[str, dict[str, Any]]] = {}
        self._journal = journal
        self.file = StateFile(
            disk,
            path,
            lambda: {"messageRequestModeMap": dict(self._modes)},
            sync_log=sync_log,
            threads=threads,
            journal=journal,
        )

    def load(self) -> None:
        """Load the file at a start."""
        run_here(self.load_parts())
        self.file.resume()

    def load_parts(self) -> Parts[None]:
        """Run `load` in parts when a master becomes a slave; the file stays suspended."""
        value = yield from self.file.load_parts(messageRequestModeMap=_SHAPE)
        self._modes = value.get("messageRequestModeMap", {})

    def set(self, topic: str, group: str, mode: str, neighbours: int) -> None:
        """Log a mode and store it. Raises BrokerError if the log refuses the record; the table is unchanged then."""
        change = ModePut(topic=topic, group=group, mode=mode, neighbours=neighbours)
        self._journal.record(change)
        self.apply(change)

    def apply(self, change: Change) -> None:
        """Apply a change that is in the metadata log."""
        if isinstance(change, ModePut):
            self._modes.setdefault(change.topic, {})[change.group] = {
                "topic": change.topic, "consumerGroup": change.group, "mode": change.mode,
                "popShareQueueNum": change.neighbours,
            }  # fmt: skip
            self.file.touch_logged()

    def image(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return a copy of the whole table, in the form that `install` accepts."""
        return {topic: dict(groups) for topic, groups in self._modes.items()}

    def install(self, image: dict[str, dict[str, dict[str, Any]]]) -> None:
        """Replace the table by that of another broker."""
        self._modes = {topic: dict(groups) for topic, groups in image.items()}
        self.file.touch_logged()

    def find(self, topic: str, group: str) -> tuple[str, int]:
        """Return the mode and the number of neighbours (RocketMQ's popShareQueueNum); PULL and -1 by default."""
        value = self._modes.get(topic, {}).get(group)
        return (PULL, -1) if value is None else (str(value["mode"]), int(value["popShareQueueNum"]))

    def to_wire(self) -> Mapping[str, Any]:
        return {"messageRequestModeMap": self._modes}
