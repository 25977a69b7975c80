"""`neve replay` and `neve dlq` against either broker: messages and dead letters are sent again, also after kills."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from neve.client import AsyncClient, BatchItem, Message, connect, sync
from tests.client_conformance.conftest import create_topic
from tests.kit.clock.waiting import until, wait_until
from tests.kit.server.neve import NEVE

COUNT = 900


def neve(server: Any, *arguments: str, fails: int = 0) -> Any:
    command = [
        NEVE,
        *arguments,
        *(["-n", server.namesrv] if arguments[1] in {"run", "resume", "redrive", "list", "show"} else []),
    ]
    if arguments[:2] == ("replay", "list"):
        command = [NEVE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == fails, done.stderr
    return json.loads(done.stdout) if not fails and done.stdout.strip() else done.stderr


def filled(server: Any, topic: str, into: str) -> None:
    async def fill() -> None:
        async with connect(server.namesrv) as client:
            await create_topic(client, into, 4)
            sender = client.batch_sender()
            await sender.put_all(
                BatchItem(Message(topic, f"{n}".encode(), "AB"[n % 2], (f"k{n}",), {"n": str(n)}), queue=n % 4)
                for n in range(COUNT)
            )
            await sender.flush()

    asyncio.run(fill())


def stored(server: Any, topic: str) -> list[Message]:
    with sync.connect(server.namesrv) as client:
        return list(client.reader(topic))


def test_selected_messages_are_counted_and_replayed(server: Any, topic: str, unique: str, tmp_path: Path) -> None:
    into = f"into-{unique}"
    filled(server, topic, into)
    options = [
        "--into",
        into,
        "--tags",
        "A",
        "--offsets",
        "10:",
        "--keep-queues",
        "--tasks",
        str(tmp_path),
        "-o",
        "json",
    ]
    counted = neve(server, "replay", "run", "half", topic, *options, "--dry-run")
    assert (stored(server, into), list(tmp_path.iterdir())) == ([], [])
    report = neve(server, "replay", "run", "half", topic, *options)
    wanted = [n for n in range(40, COUNT) if n % 2 == 0]
    assert sum(row["would_send"] for row in counted) == report["sent"] == len(wanted)
    assert (report["state"], report["left_offsets"], report["read"]) == ("done", 0, COUNT - 40)
    found = stored(server, into)
    assert sorted(int(message.body) for message in found) == wanted
    for message in found:
        n = int(message.body)
        assert (message.tags, message.keys, message.properties["n"]) == ("A", (f"k{n}",), str(n))
        assert message.queue is not None
        assert message.queue.queue_id == n % 4
        assert message.properties["NEVE_REPLAY"].endswith(f"/{topic}/{n % 4}/{n // 4}")
    assert [row["state"] for row in neve(server, "replay", "list", "--tasks", str(tmp_path), "-o", "json")] == ["done"]
    assert "replay half exists already" in neve(server, "replay", "run", "half", topic, *options, fails=5)
    assert "topic nope does not exist" in neve(
        server, "replay", "run", "other", topic, "--into", "nope", "--tasks", str(tmp_path), fails=3
    )


def test_killed_replay_resumes_and_its_duplicates_are_identifiable(
    server: Any, topic: str, unique: str, tmp_path: Path
) -> None:
    into = f"into-{unique}"
    filled(server, topic, into)
    command = [NEVE, "replay", "run", "slow", topic, "--into", into, "--rate", "300/s", "--tasks", str(tmp_path)]
    process = subprocess.Popen([*command, "-n", server.namesrv], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(stored(server, into)) > 200, "some messages")
    finally:
        process.kill()
        process.wait()
    (row,) = neve(server, "replay", "list", "--tasks", str(tmp_path), "-o", "json")
    assert row["state"] == "stopped"
    report = neve(server, "replay", "resume", "slow", "--tasks", str(tmp_path), "-o", "json")
    assert (report["state"], report["sent"]) == ("done", COUNT)
    found = stored(server, into)
    assert {int(message.body) for message in found} == set(range(COUNT))
    assert neve(server, "replay", "resume", "slow", "--tasks", str(tmp_path), "-o", "json") == report
    told = Counter(message.properties["NEVE_REPLAY"] for message in found)
    assert len(told) == COUNT
    assert len(found) - COUNT <= 300


def test_dead_letters_are_redriven_to_their_group_or_topic(run: Callable[..., None], server: Any, unique: str,
                                                            tmp_path: Path) -> None:  # fmt: skip
    tasks = ["--tasks", str(tmp_path), "-o", "json"]
    told: dict[str, str] = {}

    async def give_up(client: AsyncClient, topic: str) -> None:
        told["topic"] = topic
        async with client.consumer(unique, topic, start="earliest") as consumer:
            for n in range(4):
                await client.send(topic, f"{n}", tags="AB"[n % 2], keys=[f"k{n}"], properties={"n": str(n)})
            async with asyncio.timeout(50):
                for _ in range(4):
                    await (await anext(aiter(consumer))).nack(delay_level=-1)

        async def are_dead() -> bool:
            stats = (await client.admin.topic_stats(f"%DLQ%{unique}")).values()
            return sum(one.messages for one in stats) == 4

        await until(are_dead, "the dead letters")

    run(give_up)
    topic = told["topic"]
    assert {row["group"]: row["dead_letters"] for row in neve(server, "dlq", "list", "-o", "json")}[unique] == 4
    listed = neve(server, "dlq", "show", unique, "-o", "json")
    assert sorted((row["origin"], row["tags"], row["keys"]) for row in listed) == sorted(
        (topic, "AB"[n % 2], f"k{n}") for n in range(4)
    )
    (counted,) = neve(server, "dlq", "redrive", unique, "--tags", "B", "--dry-run", *tasks)
    assert counted["would_send"] == 2
    report = neve(server, "dlq", "redrive", unique, "--tags", "B", *tasks)
    assert (report["sent"], report["state"]) == (2, "done")

    async def get_again() -> None:
        async with (
            asyncio.timeout(50),
            connect(server.namesrv) as client,
            client.consumer(unique, topic, start="earliest") as consumer,
        ):
            got = [await anext(aiter(consumer)) for _ in range(2)]
        assert sorted((m.topic, m.body, m.tags, m.properties["n"]) for m in got) == [
            (topic, b"1", "B", "1"),
            (topic, b"3", "B", "3"),
        ]

    asyncio.run(get_again())
    assert neve(server, "dlq", "redrive", unique, *tasks)["sent"] == 0, "it goes on where the one before ended"
    assert neve(server, "dlq", "redrive", unique, "--into", "origin", "--all", *tasks)["sent"] == 4
    bodies = Counter(message.body for message in stored(server, topic))
    assert bodies == {f"{n}".encode(): 2 for n in range(4)}
    assert "no dead letters" in neve(server, "dlq", "show", f"{unique}-none", fails=3)
