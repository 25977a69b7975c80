"""`neve message`, `topic set`, `broker`, and bulk lines, against either broker."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.lines import round_trip
from neve import connect
from neve.cli import main
from neve.client import sync
from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import NEVE

NOT_FOUND = 3

Run = Callable[..., str]


@pytest.fixture
def neve(server: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return `neve("topic", "list")`, which returns the output; `code` is the expected exit code."""
    monkeypatch.setenv("NAMESRV_ADDR", server.namesrv)

    def run(*arguments: str, code: int = 0) -> str:
        ended = main.run(arguments)
        printed, said = capfd.readouterr()
        assert ended == code, said
        return printed if code == 0 else said

    return run


def test_lines_are_consumed_byte_for_byte(server: Any, tmp_path: Path) -> None:
    assert len(list(round_trip(server.namesrv, tmp_path, 5000))) == 5


def test_message_is_found_by_its_ids_key_offset_or_time(neve: Run, topic: str, unique: str) -> None:
    receipt = json.loads(neve("produce", topic, "hello", "-k", unique, "-p", "colour=red", "--queue", "2"))
    neve("produce", topic, "later", "--queue", "2")
    of_topic = ("message", "show", "-t", topic)

    def found(*how: str) -> dict[str, Any]:
        first: dict[str, Any] = json.loads(neve(*of_topic, *how, "-o", "json").splitlines()[0])
        return first

    wait_until(lambda: main.run([*of_topic, "--key", unique]) == 0, "the key index")
    neve("topic", "list")  # Discard the output so far.
    by_key = found("--key", unique)
    assert (by_key["body"], by_key["keys"], by_key["msg_id"]) == ("hello", [unique], receipt["msg_id"])
    assert found(receipt["msg_id"]) == by_key
    assert found("--queue", "2", "--offset", "0") == by_key
    assert found("--at", "-1h") == by_key
    table = neve(*of_topic, receipt["msg_id"])
    offset_id = next(line.split()[1] for line in table.splitlines() if line.startswith("offset_msg_id"))
    assert found(offset_id) == by_key
    assert neve(*of_topic, "--queue", "2", "--offset", "1", "-o", "body") == "later"
    neve(*of_topic, "--queue", "2", "--offset", "7", code=NOT_FOUND)
    neve(*of_topic, "--key", "nobody", code=NOT_FOUND)


def test_message_is_resent_to_one_group(server: Any, neve: Run, topic: str, unique: str) -> None:
    receipt = json.loads(neve("produce", topic, "again"))
    first, other = f"{unique}-1", f"{unique}-2"
    with (
        sync.connect(server.namesrv) as client,
        client.consumer(first, topic, start="earliest") as ours,
        client.consumer(other, topic, start="earliest") as theirs,
    ):
        for consumer in (ours, theirs):
            message = consumer.receive(timeout=30)
            assert message is not None
            assert message.body == b"again"
        retry = f"%RETRY%{first}"
        wait_until(lambda: retry in client.admin.topic_list(), "the group's retry topic")
        neve("message", "resend", receipt["msg_id"], "-t", topic, "-g", first)
        message = ours.receive(timeout=60)
        assert message is not None
        assert (message.body, message.topic, message.msg_id) == (b"again", topic, receipt["msg_id"])
        assert theirs.receive(timeout=0.5) is None
    neve("message", "resend", receipt["msg_id"], "-t", topic, "-g", f"{unique}-nobody", code=NOT_FOUND)


def test_message_trace_shows_producer_and_consumer(server: Any, neve: Run, topic: str, unique: str) -> None:
    async def send_and_consume() -> str:
        async with connect(server.namesrv, trace=True) as client:
            result = await client.send(topic, b"traced")
            async with client.consumer(unique, topic, start="earliest") as consumer:
                message = await consumer.receive(timeout=30)
                assert message is not None
                await message.ack()
            return result.msg_id

    msg_id = asyncio.run(send_and_consume())
    rows: list[dict[str, Any]] = []

    def both() -> bool:
        if main.run(["message", "trace", msg_id]) != 0:
            return False
        neve("message", "trace", msg_id)
        rows[:] = json.loads(neve("message", "trace", msg_id, "-o", "json"))
        return {row["what"] for row in rows} == {"sent", "consumed"}

    wait_until(both, "both traces")
    assert [(row["what"], row["outcome"]) for row in rows] == [("sent", "success"), ("consumed", "success")]
    assert rows[1]["group"] == unique
    neve("message", "trace", "0" * 32, code=NOT_FOUND)


def test_topic_set_keeps_unnamed_settings(neve: Run, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def described() -> dict[str, Any]:
        rows: dict[str, Any] = json.loads(neve("topic", "show", topic, "-o", "json"))
        return rows

    neve("topic", "set", topic, "--queues", "6")
    assert (described()["read_queues"], described()["write_queues"], described()["perm"]) == (6, 6, 6)
    neve("topic", "set", topic, "--perm", "r")
    assert (described()["read_queues"], described()["perm"]) == (6, 4)
    neve("topic", "set", topic, "--perm", "rw", "--write-queues", "2")
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert (described()["read_queues"], described()["write_queues"], described()["perm"]) == (6, 2, 6)
    assert "nothing was changed" in neve("topic", "set", topic, "--queues", "1", code=1)
    neve("topic", "set", topic, "--queues", "2", "--yes")
    assert described()["read_queues"] == 2
    neve("topic", "set", "no-such-topic", "--queues", "2", code=NOT_FOUND)


def test_configuration_of_a_running_broker_is_shown_and_changed(server: Any, neve: Run) -> None:
    (row,) = json.loads(neve("broker", "list", "-o", "json"))
    name = row["broker"]
    assert row["role"] == "master"
    assert json.loads(neve("broker", "describe", name, "-o", "json"))["members"] == {"0": row["address"]}

    def value() -> str:
        (found,) = json.loads(neve("broker", "config", "show", name, "transactionCheckMax", "-o", "json"))
        return str(found["value"])

    before = value()
    neve("broker", "config", "set", name, "transactionCheckMax=17")
    assert value() == "17"
    if server.kind == "neve":
        (row,) = json.loads(neve("broker", "config", "show", name, "transactionCheckMax", "-o", "json"))
        assert row["instead_of"] == before
        neve("broker", "config", "unset", name, "hotBytes", code=NOT_FOUND)
        neve("broker", "config", "unset", name, "--all")
    else:
        assert "write changes to their file" in neve("broker", "config", "unset", name, "--all", code=1)
        neve("broker", "config", "set", name, f"transactionCheckMax={before}")
    assert value() == before
    neve("broker", "config", "set", name, "noSuchKey=1", code=NOT_FOUND)
    neve("broker", "config", "show", "nobody", code=NOT_FOUND)
    assert len(json.loads(neve("broker", "config", "show", name, "flush*", "-o", "json"))) > 1


def test_writes_to_a_broker_are_disabled_and_enabled(neve: Run, topic: str) -> None:
    (row,) = json.loads(neve("broker", "list", "-o", "json"))
    try:
        neve("broker", "set", row["broker"], "--no-writes", "--yes")
        assert "no queue to write to" in neve("produce", topic, "x", code=NOT_FOUND)
    finally:
        neve("broker", "set", row["broker"], "--writes")
    neve("produce", topic, "x")


def test_cluster_show_reports_members_and_a_dead_name_server(server: Any, neve: Run, topic: str) -> None:
    (row,) = json.loads(neve("cluster", "list", "-o", "json"))
    assert (row["cluster"], row["brokers"], row["members"], row["without_master"]) == ("DefaultCluster", 1, 1, None)
    assert row["topics"] >= 1
    told = json.loads(neve("cluster", "show", "-o", "json"))
    assert [one["address"] for one in told["members"]] == [server.broker]
    assert told["name_servers"] == [{"name_server": server.namesrv, "members": 1, "problem": None}]
    said = neve("cluster", "show", "-n", f"{server.namesrv};127.0.0.1:1", code=1)
    assert "127.0.0.1:1: " in said
    neve("cluster", "show", "NoSuchCluster", code=NOT_FOUND)


def test_topic_show_reports_the_tiers_of_its_messages(server: Any, neve: Run, topic: str) -> None:
    for queue in ("0", "1"):
        neve("produce", topic, "hot", "--queue", queue)
    if server.kind == "neve":
        neve("archive", "offload", "--roll", "--admin", server.admin)
    neve("produce", topic, "new", "--queue", "1")
    told = json.loads(neve("topic", "show", topic, "--tiers", "-o", "json"))
    assert told["summary"]["messages"] == 3
    places = {row["queue"]: (row["min"], row["archived"], row["max"]) for row in told["offsets"]}
    if server.kind == "neve":
        assert (places[0], places[1], places[2]) == ((0, 1, 1), (0, 1, 2), (0, 0, 0))
        assert [(row["objects"], row["rows"]) for row in told["sizes"]] == [(1, 2)]
        (sync,) = told["syncs"]
        assert sync["not_archived"] == 1
        assert sync["behind_ms"] is not None
        text = neve("topic", "show", topic, "--tiers")
        assert [text.count(word + "\n") for word in ("SUMMARY", "OFFSET", "SIZE", "SYNC")] == [1, 1, 1, 1]
    else:
        assert (places[1], told["sizes"], told["syncs"]) == ((0, None, 2), [], [])
        assert "has an archive" in neve("topic", "show", topic, "--tiers")
    neve("topic", "show", "no-such-topic", "--tiers", code=NOT_FOUND)


def test_topic_trim_deletes_oldest_messages_if_the_broker_supports_it(server: Any, neve: Run, topic: str) -> None:
    for number in range(4):
        neve("produce", topic, str(number), "--queue", "1")
    trim = ("topic", "trim", topic, "--before-offset", "3", "--queue", "1", "--yes")
    if server.kind == "apache":
        assert "cannot delete by offset or time" in neve(*trim, code=1)
        assert len(neve("consume", topic).split()) == 4
        return
    neve(*trim, "--admin", server.admin)
    assert neve("consume", topic) == "3\n"
    neve("topic", "trim", "no-such-topic", "--before-time", "-1d", "--yes", code=NOT_FOUND)


def test_top_shows_traffic_by_topic_and_group(server: Any, neve: Run, topic: str, unique: str) -> None:
    for _ in range(3):
        neve("produce", topic, "x" * 100)
    neve("consume", topic, "--group", unique, "--count", "2")

    def seen() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        told = json.loads(neve("top", topic, "--once", "-o", "json"))
        ((of_topic,), of_groups) = told["topics"], [row for row in told["groups"] if row["topic"] == topic]
        return of_topic, of_groups

    # Both kinds of broker compute rates in steps of ten seconds.
    wait_until(lambda: seen()[0]["in_per_s"] > 0 and any(row["out_per_s"] > 0 for row in seen()[1]), "the rates")
    of_topic, (of_group,) = seen()
    assert of_topic["in_bytes_per_s"] > of_topic["in_per_s"] * 100
    assert (of_group["group"], of_group["tier"]) == (unique, None if server.kind == "apache" else of_group["tier"])
    text = neve("top", "--once", "--rows", "200")
    assert topic in text
    assert unique in text


def test_bench_measures_a_cluster_and_removes_its_topics(server: Any, neve: Run, topic: str) -> None:
    before = neve("topic", "list")
    sent = json.loads(
        neve("bench", "produce", topic, "--messages", "501", "--batch", "50", "--size", "64", "-o", "json")
    )
    assert (sent["messages"], sent["bytes"], sent["failed"]) == (501, 501 * 64, 0)
    assert 0 < sent["p50_ms"] <= sent["p99_ms"] <= sent["max_ms"]
    assert sent["broker_cpu_us"] is not None  # The broker runs on this machine.

    def shown() -> int:
        told = json.loads(neve("topic", "show", topic, "--tiers", "-o", "json"))
        return int(told["summary"]["messages"])

    wait_until(lambda: shown() == 501, "all messages")  # Apache's broker shows them slightly later.
    own = json.loads(neve("bench", "consume", "--messages", "300", "--size", "64", "-o", "json"))
    assert (own["messages"], own["bytes"]) == (300, 300 * 64)
    read = json.loads(neve("bench", "consume", topic, "-o", "json"))
    assert (read["messages"], read["bytes"]) == (501, 501 * 64)
    neve("bench", "consume", "no-such-topic", code=NOT_FOUND)
    both = json.loads(neve("bench", "latency", "--messages", "100", "--rate", "200", "-o", "json"))
    assert (both["messages"], both["not_received"]) == (100, 0)
    assert both["seconds"] >= 99 / 200
    assert neve("topic", "list") == before


def test_shell_completion_offers_names_of_the_cluster(server: Any, neve: Run, topic: str, unique: str) -> None:
    neve("produce", topic, "x")
    neve("consume", topic, "--group", unique, "--count", "1")
    broker = json.loads(neve("broker", "list", "-o", "json"))[0]["broker"]
    for line, names in (
        (f"neve consume {topic[:6]}", topic),
        (f"neve group lag {unique[:6]}", unique),
        ("neve broker show ", broker),
    ):
        done = subprocess.run(
            [NEVE],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={
                **os.environ,
                "NAMESRV_ADDR": server.namesrv,
                "_NEVE_COMPLETE": "bash_complete",
                "COMP_WORDS": line,
                "COMP_CWORD": str(line.count(" ")),
            },
        )
        assert f"plain,{names}" in done.stdout.splitlines(), (line, done)
