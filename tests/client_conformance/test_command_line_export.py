"""`neve export` from either broker and `neve import` into either: no message is lost, duplicated or reordered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from neve import connect
from neve.cli import main
from neve.client import Message
from neve.client.validators import RESERVED_PROPERTIES
from tests.kit.server.neve import NeveServer

COUNT = 700
#: Only of messages with even numbers.
PROPERTIES = {"größe": "5 €"}

Run = Callable[..., str]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the name server of another cluster, which is neve's."""
    with NeveServer(tmp_path_factory.mktemp("other")) as neve:
        yield neve.namesrv


@pytest.fixture
def neve(capfd: pytest.CaptureFixture[str]) -> Run:
    def run(namesrv: str, *arguments: str, code: int = 0) -> str:
        ended = main.run([*arguments, "-n", namesrv])
        _, said = capfd.readouterr()
        assert ended == code, said
        return said

    return run


async def fill(namesrv: str, topic: str, group: str) -> None:
    """Fill two queues; the group has read a part of them."""
    async with asyncio.timeout(60), connect(namesrv) as client:
        await client.admin.create_topic(topic, 2)
        for queue in (0, 1):
            messages = [
                Message(topic, bytes([0, 255, number % 256]) * (1 + number), "new", (f"k{number}",),
                        {} if number % 2 else PROPERTIES, number)
                for number in range(COUNT)
            ]  # fmt: skip
            for begin in range(0, COUNT, 100):
                await client.send_batch(topic, messages[begin : begin + 100], queue=queue)
        async with client.consumer(group, topic, start="earliest", max_buffered_per_queue=200) as consumer:
            for _ in range(300):
                await anext(consumer)


async def content(namesrv: str, topic: str) -> list[tuple[Any, ...]]:
    """Return by queue the fields that applications set, and the ids."""
    async with asyncio.timeout(60), connect(namesrv) as client:
        found = []
        async for one in client.reader(topic):
            assert one.queue is not None
            own = {name: value for name, value in one.properties.items() if name not in RESERVED_PROPERTIES}
            found.append((one.queue.queue_id, one.msg_id, one.body, one.tags, one.keys, own, one.flag))
        return found


async def positions(namesrv: str, group: str, topic: str) -> list[int | None]:
    async with connect(namesrv) as client:
        return [await client.committed(group, topic, queue) for queue in (0, 1)]


@pytest.mark.parametrize("into", ["other", "server"])
def test_topic_is_copied_completely_and_once_with_its_groups(
    server: Any, other: str, neve: Run, unique: str, tmp_path: Path, into: str
) -> None:
    source, target = (server.namesrv, other) if into == "other" else (other, server.namesrv)
    topic, group, directory = f"t{unique}", f"g{unique}", str(tmp_path / "export")
    asyncio.run(fill(source, topic, group))
    assert f"{2 * COUNT} messages of 1 topics were added" in neve(source, "export", directory, "-t", topic)
    assert "0 messages of 1 topics were added" in neve(source, "export", directory, "-t", topic)

    # A kill in the middle of a line: the rest is exported again.
    (file, *_) = sorted((tmp_path / "export" / topic).iterdir())
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-10]) + lines[-10][:50])
    assert "10 messages of 1 topics were added" in neve(source, "export", directory, "-t", topic)
    assert file.read_bytes() == whole

    assert f"{2 * COUNT} messages of 1 topics were sent" in neve(target, "import", directory)
    before = asyncio.run(content(source, topic))
    assert asyncio.run(content(target, topic)) == before

    # Offsets are equal here because both topics were new.
    stood = asyncio.run(positions(source, group, topic))
    assert sum(one or 0 for one in stood) == 300
    assert asyncio.run(positions(target, group, topic)) == stood

    async def read_on(offset: int) -> None:
        async with connect(target) as client:
            await client.commit(group, topic, 0, offset)

    asyncio.run(read_on(COUNT))

    # A kill leaves a state older than the sent messages: no message is sent twice.
    (state,) = (tmp_path / "export").glob("import.*.json")
    row = json.loads(state.read_text())
    for queue in row.values():
        queue["position"], queue["runs"] = 0, []
    state.write_text(json.dumps(row))
    assert "0 messages of 0 topics were sent" in neve(target, "import", directory)
    assert asyncio.run(content(target, topic)) == before
    assert json.loads(state.read_text()) != row
    assert asyncio.run(positions(target, group, topic)) == [COUNT, stood[1]], "a group that reads here is not set back"
    neve(target, "import", directory, "--overwrite-offsets")
    assert asyncio.run(positions(target, group, topic)) == stood
    neve(target, "import", directory, "-t", "no-such-topic", code=3)

    # Another cluster of the same name has other messages there, which must not prevent sending.
    row = json.loads(state.read_text())
    next(iter(row.values()))["last_id"] = "0" * 32
    state.write_text(json.dumps(row))
    assert "it is another cluster" in neve(target, "import", directory, code=5)


def test_import_rejects_an_invalid_export(other: str, neve: Run, tmp_path: Path) -> None:
    neve(other, "import", str(tmp_path), code=3)
    (tmp_path / "export.json").write_text("{")
    assert "cannot be read" in neve(other, "import", str(tmp_path), code=1)
    (tmp_path / "export.json").write_text('{"version": 2}')
    assert "has version 2" in neve(other, "import", str(tmp_path), code=1)


def test_export_directory_accepts_more_topics_of_the_same_cluster_only(
    server: Any, other: str, neve: Run, unique: str, tmp_path: Path
) -> None:
    first, second, directory = f"a{unique}", f"b{unique}", str(tmp_path / "export")
    for namesrv in (server.namesrv, other):
        neve(namesrv, "topic", "create", first, "--queues", "1")
    neve(other, "topic", "create", second, "--queues", "1")
    neve(other, "produce", first, "here")
    neve(other, "produce", second, "here")
    neve(other, "export", directory, "-t", first)
    neve(other, "export", directory, "-t", second)
    assert [*json.loads((tmp_path / "export" / "export.json").read_text())["topics"]] == [first, second]

    neve(server.namesrv, "topic", "create", second, "--queues", "1")
    neve(server.namesrv, "produce", second, "elsewhere")
    neve(server.namesrv, "produce", second, "elsewhere")
    (file,) = (tmp_path / "export" / second).iterdir()
    (broker,) = asyncio.run(brokers_of(server.namesrv))
    file.rename(file.with_name(f"{broker}.0.jsonl"))
    assert "the file is of another cluster" in neve(server.namesrv, "export", directory, "-t", second, code=5)


async def brokers_of(namesrv: str) -> list[str]:
    async with connect(namesrv) as client:
        return sorted(await client.admin.cluster_info())
