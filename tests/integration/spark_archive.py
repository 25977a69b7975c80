"""Archives that Spark reads in tests."""

from __future__ import annotations

from infra.objects.store import ObjectStore
from neve.archive.format.journal import Commit, Expire, Intent, PlannedObject
from neve.archive.format.keys import data_key
from tests.kit.archive.archive_on_paper import T0, ArchiveOnPaper
from tests.kit.archive.written_rows import row, written

TOPIC = "%RETRY%g|x"  # The characters that must be escaped in Hive paths.
LONG = "%RETRY%" + "|" * 120  # Longer than a path component may be.


def fill(store: ObjectStore) -> None:
    """Fill the archive of TOPIC and of a topic whose name is too long for a path.

    Queue 0 of broker a: 0…9 expired, 10…19 with the minimum at 15, 20…29. Queue 1 of broker b; one object was never
    published. Broker c has the topic with the long name.
    """
    a = ArchiveOnPaper(store, "a", TOPIC)
    gone = a.write(0, 0, 0, 10, hour=0)
    a.write(100, 0, 10, 10, hour=1)
    a.write(200, 0, 20, 10, hour=2)
    a.checkpoint()
    a.append(Expire(keys=[gone], delete_after_ms=T0, minimums={TOPIC: {0: 15}}))
    a.write(300, 0, 30, 10, hour=3, commit=False)
    ArchiveOnPaper(store, "b", TOPIC).write(0, 1, 0, 10, hour=2)
    ArchiveOnPaper(store, "c", LONG).write(0, 0, 0, 5, hour=0)


def commit(archive: ArchiveOnPaper, number: int, first: int, last: int) -> str:
    """Commit an undamaged object of queue 0 with all its hashes."""
    import msgspec

    topic, day, start = archive.topic, "2026-01-01", 100 * number
    key = data_key("", topic, day, archive.broker, start=start, end=start + 100, epoch=1)
    name, data = written([[row(0, offset) for offset in range(first, last + 1)]], topic)
    archive.store.put(key, data, if_absent=True)
    name = msgspec.structs.replace(name, key=key, start=start, end=start + 100)
    archive.append(Intent(round=number, names=[PlannedObject(key, topic, day, start, start + 100, {0: (first, last)})]))
    archive.append(Commit(round=number, names=[name]))
    return key
