"""Which queues a client consumes and how: the share-out that pop clients leave to the broker, and its settings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from broker.tables.state_file import StateFile
from infra.disk import Disk
from infra.threads import SYSTEM_THREADS, Threads
from neve.remoting.body import MessageQueue

PULL, POP = "PULL", "POP"
AVERAGE, BY_CIRCLE = "AVG", "AVG_BY_CIRCLE"


def share(strategy: str, client: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> list[MessageQueue]:
    """The client's own part, as the clients' own strategies cut it. Raises ValueError for an unknown strategy."""
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
    """All queues for everybody, or the client's own part and that of so many clients after it."""
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
    """Pull or pop, for each topic and group; groups that were never set pull."""

    def __init__(self, disk: Disk, path: Path, threads: Threads = SYSTEM_THREADS) -> None:
        self._modes: dict[str, dict[str, dict[str, Any]]] = {}
        self.file = StateFile(disk, path, lambda: {"messageRequestModeMap": dict(self._modes)}, threads=threads)

    def load(self) -> None:
        shape = dict[str, dict[str, dict[str, Any]]]
        self._modes |= self.file.load(messageRequestModeMap=shape).get("messageRequestModeMap", {})

    def set(self, topic: str, group: str, mode: str, neighbours: int) -> None:
        self._modes.setdefault(topic, {})[group] = {
            "topic": topic, "consumerGroup": group, "mode": mode, "popShareQueueNum": neighbours,
        }  # fmt: skip
        self.file.touch()

    def find(self, topic: str, group: str) -> tuple[str, int]:
        value = self._modes.get(topic, {}).get(group)
        return (PULL, -1) if value is None else (str(value["mode"]), int(value["popShareQueueNum"]))

    def to_wire(self) -> Mapping[str, Any]:
        return {"messageRequestModeMap": self._modes}
