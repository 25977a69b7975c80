"""`neve migrate` between two clusters: what it creates, keeps, changes and refuses, and which offsets groups get."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.wire import Client
from neve.cli import main
from neve.client import sync
from neve.client.model import Message
from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import Serving

CONFLICT, FAILED, USAGE, NOT_FOUND = 5, 1, 2, 3
GROUP = "tour"


class Two:
    """Two clusters, and the command that migrates between them."""

    def __init__(self, old: Serving, new: Serving, capfd: pytest.CaptureFixture[str]) -> None:
        self.old, self.new, self._capfd = old, new, capfd
        self.said = ""

    def __call__(self, *words: str, code: int = 0) -> list[dict[str, Any]]:
        """Return the rows printed by `neve migrate` from the old cluster to the new one."""
        self._capfd.readouterr()
        ended = main.run(["migrate", *words, "-n", self.old.namesrv, "--to-namesrv", self.new.namesrv, "-o", "json"])
        told = self._capfd.readouterr()
        assert ended == code, told.err
        self.said = told.err
        return list(json.loads(told.out)) if told.out else []


def started(directory: Path, name: str) -> Serving:
    ports = ["--port", "0", "--namesrv-port", "0"]
    directory.mkdir()
    return Serving(directory, "up", "--data", str(directory / "data"), *ports, "--set", f"brokerName={name}")


@pytest.fixture
def two(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Two]:
    with ExitStack() as stack:
        old, new = (stack.enter_context(started(tmp_path / name, name)) for name in ("old", "new"))
        yield Two(old, new, capfd)


def places(rows: list[dict[str, Any]]) -> dict[tuple[str, int], tuple[int | None, int | None, str]]:
    return {(row["topic"], row["queue"]): (row["to_queue"], row["to_offset"], row["how"]) for row in rows}


def test_topics_and_groups_are_created_kept_or_overwritten(two: Two) -> None:
    with sync.connect(two.old.namesrv) as old, sync.connect(two.new.namesrv) as new:
        old.admin.create_topic("orders", 3, {"reserve.time": "48"})
        old.admin.create_topic("bills", 2)
        new.admin.create_topic("bills", 1)
        with old.consumer(GROUP, "orders", start="earliest"):
            pass
        old.admin.set_request_mode(GROUP, "orders", "POP")
        assert {(row["topic"], row["state"]) for row in two("topics", "--dry-run", code=CONFLICT)} == {
            ("orders", "created"), ("bills", "differs")
        }  # fmt: skip
        assert "orders" not in new.admin.topic_list()
        rows = {row["topic"]: row for row in two("topics", code=CONFLICT)}
        assert rows["bills"]["note"] == "readQueueNums: 2, at the target 1, writeQueueNums: 2, at the target 1"
        assert "were not changed: bills" in two.said
        made = new.admin.topic_config("orders")
        assert (made.read_queues, made.write_queues, made.attributes) == (3, 3, {"reserve.time": "48"})
        assert new.admin.topic_config("bills").read_queues == 1
        assert [row["state"] for row in two("topics", "-t", "bills", "--overwrite")] == ["changed"]
        assert new.admin.topic_config("bills").read_queues == 2
        new.admin.create_topic("bills", 3)
        (left,) = two("topics", "-t", "bills", "--overwrite", code=CONFLICT)
        assert left["note"].endswith("fewer queues to read would hide messages: use neve topic set")
        assert new.admin.topic_config("bills").read_queues == 3
        new.admin.delete_topic("bills")
        assert [row["state"] for row in two("topics", "-t", "bills")] == ["created"]
        assert {row["state"] for row in two("topics")} == {"same"}
        two("topics", "-t", "nothing", code=NOT_FOUND)

        assert [(row["group"], row["state"]) for row in two("groups", "--dry-run")] == [(GROUP, "created")]
        assert [(row["group"], row["state"]) for row in two("groups")] == [(GROUP, "created")]
        assert [(row["group"], row["state"]) for row in two("groups")] == [(GROUP, "same")]
        assert b"POP" in raw(two.new, 402)


def raw(server: Serving, code: int) -> bytes:
    with Client(server.broker) as client:
        return client.ask(code, {}).body


def test_offsets_are_mapped_to_the_next_message_at_the_target(two: Two) -> None:
    with sync.connect(two.old.namesrv) as old, sync.connect(two.new.namesrv) as new:
        for topic, queues in (("copied", 2), ("sent_again", 2), ("apart", 1)):
            old.admin.create_topic(topic, queues)
            new.admin.create_topic(topic, queues)
        with old.consumer(GROUP, "copied", start="earliest"):
            pass
        two("groups")

        def message(topic: str, name: str) -> Message:
            return Message(topic, name.encode(), properties={"UNIQ_KEY": f"{topic}-{name}"})

        new.send("sent_again", "was there before", queue=0)
        for queue in range(2):
            for number in range(5):
                for topic in ("copied", "sent_again"):
                    old.send_batch(topic, [message(topic, f"{queue}-{number}")], queue=queue)
                    if topic == "copied" or queue == 0:
                        new.send_batch(topic, [message(topic, f"{queue}-{number}")], queue=queue)
        old.send("apart", "old")
        for offset, topic in enumerate(("copied", "sent_again")):
            old.commit(GROUP, topic, 0, 3)
            old.commit(GROUP, topic, 1, 5 - offset)
        old.commit(GROUP, "apart", 0, 1)
        new.send("apart", "new", queue=0)

        expected = {
            ("copied", 0): (0, 3, "same offset"),
            ("copied", 1): (1, 5, "same offset"),  # All messages are read: the offset is behind the last.
            ("sent_again", 0): (0, 4, "by message"),
            ("sent_again", 1): (None, None, "unknown"),
        }
        wait_until(lambda: bool(new_copies(two)), "the key index")
        assert places(two("offsets", "-t", "copied", "-t", "sent_again", "--dry-run", code=FAILED)) == expected
        assert b"sent_again@tour" not in raw(two.new, 43)
        assert places(two("offsets", "-t", "copied", "-t", "sent_again", code=FAILED)) == expected
        assert "1 committed offsets are unknown at the target, among them tour in queue 1 of sent_again" in two.said
        assert [new.committed(GROUP, "sent_again", 0), new.committed(GROUP, "copied", 1)] == [4, 5]
        # The last consumed message has no copy at the target, so the group starts at the beginning there.
        assert places(two("offsets", "-t", "apart")) == {("apart", 0): (0, 0, "beginning")}

        new.commit(GROUP, "sent_again", 0, 5)
        assert places(two("offsets", "-t", "sent_again", code=FAILED))["sent_again", 0] == (0, 5, "kept")
        two("offsets", "-t", "sent_again", "--overwrite", code=FAILED)
        assert new.committed(GROUP, "sent_again", 0) == 4


def new_copies(two: Two) -> bytes:
    ext = {"topic": "sent_again", "key": "sent_again-0-3", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 1 << 53}
    with Client(two.new.broker) as client:
        return client.invoke(12, {**ext, "_UNIQUE_KEY_QUERY": "true"}).body


def test_migrate_without_a_distinct_target_is_rejected(two: Two, capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run(["migrate", "topics", "-n", two.old.namesrv]) == USAGE
    assert "name the target" in capfd.readouterr().err
    assert main.run(["migrate", "topics", "-n", two.old.namesrv, "--to-broker", "old"]) == USAGE
    assert "is the source itself" in capfd.readouterr().err
