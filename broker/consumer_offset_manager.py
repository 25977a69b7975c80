"""What each group has consumed: topic@group → queue → next offset to consume. Written every few seconds, whole."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from broker.state_file import StateFile, SyncLog
from infra.disk import Disk

SEPARATOR = "@"


class ConsumerOffsetManager:
    """Commits are not monotonic: a client may set a group back.

    Where a group pops, the pop book is the truth and tells this table (`follow`); who sets such a group elsewhere tells
    the book first (`on_set`), or the book would put the old position back.
    """

    def __init__(self, disk: Disk, path: Path, sync_log: SyncLog) -> None:
        self._offsets: dict[str, dict[int, int]] = {}
        # Where the last pull of a group ended; only for statistics, not kept on disk.
        self._pulls: dict[str, dict[int, int]] = {}
        # Where an administrator sent a group; until its next pull hears it, the group's own commits are stale.
        self._resets: dict[str, dict[int, int]] = {}
        self.on_set: Callable[[str, str, int, int], object] = _nobody_pops
        self.file = StateFile(disk, path, self._snapshot, sync_log=sync_log)

    def load(self) -> None:
        self._offsets |= self.file.load(offsetTable=dict[str, dict[int, int]]).get("offsetTable", {})

    def _snapshot(self) -> Mapping[str, Any]:
        return {"offsetTable": dict(self._offsets)}

    def table(self) -> dict[str, dict[int, int]]:
        """topic@group → queue → next offset to consume."""
        return {name: dict(queues) for name, queues in self._offsets.items()}

    def restore(self, table: Mapping[str, Mapping[int, int]]) -> None:
        """Take a whole table, as `table` gave it."""
        self._offsets.update({name: dict(queues) for name, queues in table.items()})
        self.file.touch()

    def commit(self, group: str, topic: str, queue: int, offset: int) -> None:
        name = topic + SEPARATOR + group
        if self._resets and queue in self._resets.get(name, ()):
            return
        queues = self._offsets.setdefault(name, {})
        if queues.get(queue) != offset:
            self.on_set(group, topic, queue, offset)
            queues[queue] = offset
        self.file.touch()

    def follow(self, group: str, topic: str, queue: int, offset: int) -> None:
        """Where the pop book says that the group stands."""
        self._offsets.setdefault(topic + SEPARATOR + group, {})[queue] = offset
        self.file.touch()

    def reset(self, group: str, topic: str, queue: int, offset: int) -> None:
        """Set a group to an offset, and its running consumers with their next pull or pop.

        Also to where it stands: what it was given above that comes again.
        """
        self.on_set(group, topic, queue, offset)
        self.follow(group, topic, queue, offset)
        self._resets.setdefault(topic + SEPARATOR + group, {})[queue] = offset

    def take_reset(self, group: str, topic: str, queue: int) -> int | None:
        """Where this pull is to go on instead, told once; a pop goes on there by itself."""
        if not self._resets:
            return None
        name = topic + SEPARATOR + group
        queues = self._resets.get(name, {})
        target = queues.pop(queue, None)
        if not queues:
            self._resets.pop(name, None)
        return target

    def clone(self, source: str, target: str, topic: str) -> None:
        """The target group stands in the topic where the source stands."""
        queues = self._offsets.get(topic + SEPARATOR + source)
        if queues is not None:
            for queue, offset in queues.items():
                self.on_set(target, topic, queue, offset)
            self._offsets[topic + SEPARATOR + target] = dict(queues)
            self.file.touch()

    def queues_of(self, group: str, topic: str) -> dict[int, int]:
        return dict(self._offsets.get(topic + SEPARATOR + group, {}))

    def query(self, group: str, topic: str, queue: int) -> int:
        """-1: the group has none."""
        queues = self._offsets.get(topic + SEPARATOR + group)
        return -1 if queues is None else queues.get(queue, -1)

    def commit_pull(self, group: str, topic: str, queue: int, offset: int) -> None:
        self._pulls.setdefault(topic + SEPARATOR + group, {})[queue] = offset

    def query_pull(self, group: str, topic: str, queue: int) -> int:
        return self._pulls.get(topic + SEPARATOR + group, {}).get(queue, -1)

    def topics_of(self, group: str) -> list[str]:
        return [topic for topic, owner in self.pairs() if owner == group]

    def groups_of(self, topic: str) -> list[str]:
        return [owner for name, owner in self.pairs() if name == topic]

    def delete_topic(self, topic: str) -> None:
        self._drop(lambda name, group: name == topic)

    def delete_group(self, group: str) -> None:
        self._drop(lambda topic, owner: owner == group)

    def clip(self, maximum: Callable[[str, int], int]) -> list[str]:
        """After an unclean stop no group may stand above its queue's end: it would miss what is sent next."""
        clipped = []
        for name, queues in self._offsets.items():
            topic = name.partition(SEPARATOR)[0]
            for queue, offset in queues.items():
                bound = maximum(topic, queue)
                if offset > bound:
                    queues[queue] = bound
                    clipped.append(f"{name} queue {queue}: {offset} → {bound}")
        if clipped:
            self.file.touch()
        return clipped

    def pairs(self) -> Iterable[tuple[str, str]]:
        """Topic and group wherever a group stands."""
        for name in self._offsets:
            topic, _, group = name.partition(SEPARATOR)
            yield topic, group

    def _drop(self, matches: Callable[[str, str], bool]) -> None:
        for table in (self._offsets, self._pulls, self._resets):
            for name in [name for name in table if matches(*name.split(SEPARATOR, 1))]:
                del table[name]
        self.file.touch()


def _nobody_pops(group: str, topic: str, queue: int, offset: int) -> None:
    """Until a pop book listens."""
