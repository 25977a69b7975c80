"""The Python side of Agent.java and similar programs: a JVM with stock clients that answers each line with rows."""

from __future__ import annotations

import base64
import queue
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO, NamedTuple, Self

from bench import jvm

SOURCES = Path(__file__).parent / "java"
#: Makes clients rebalance several times a second instead of every 20 s.
_REBALANCE = "-Drocketmq.client.rebalance"
FLAGS = [*jvm.CLIENT_FLAGS, f"{_REBALANCE}.waitInterval=300", f"{_REBALANCE}.minInterval=100"]
TAKE_S = 60
_ANSWER_S = 2 * TAKE_S + 30


class Acknowledged(NamedTuple):
    """An acknowledged send. For a committed transaction, queue and offset are those of its half message."""

    queue: int
    offset: int
    key: str
    body: bytes


class Consumed(NamedTuple):
    """All fields of a message that a consumer can see, except the time of consumption."""

    topic: str
    queue: int
    offset: int
    retries: int
    flag: str
    sys_flag: str
    born: int
    born_host: str
    stored: int
    store_host: str
    size: str
    offset_id: str
    unique_id: str
    crc: str
    prepared: str
    properties: str
    body: bytes

    @property
    def place(self) -> tuple[str, int, int]:
        return self.topic, self.queue, self.offset

    @property
    def key(self) -> str:
        return self.value_of("KEYS")

    def value_of(self, name: str) -> str:
        """Return the value of a property."""
        return dict(line.split("=", 1) for line in self.properties.splitlines())[name]


class Conversation:
    """A Java program that answers each line of its input with rows and END, or with ERROR and the reason."""

    def __init__(self, main: str, *arguments: str, sources: Path, version: str, home: Path) -> None:
        (home / "conf").mkdir(parents=True, exist_ok=True)
        # mqadmin of 4.x exits without effect if this variable is unset.
        (home / "conf" / "logback_tools.xml").write_text("<configuration/>")
        flags = [*FLAGS, f"-Drocketmq.home.dir={home}"]
        command = jvm.java(jvm.classes(sources, version), main, *arguments, home=home, flags=flags)
        self.version = version
        self._log = home / "agent.log"
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8"
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in: IO[str] = self._process.stdin
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, out: IO[str]) -> None:
        for line in out:
            self._lines.put(line.rstrip("\n"))
        self._lines.put("ERROR\tthe agent ended")

    def ask(self, *words: object) -> list[list[str]]:
        """Return the rows of the answer. An error of the client fails the test."""
        self._in.write("\t".join(map(str, words)) + "\n")
        self._in.flush()
        rows: list[list[str]] = []
        while (line := self._lines.get(timeout=_ANSWER_S)) != "END":
            assert not line.startswith("ERROR\t"), f"{words}: {line}\n{self._log.read_text()[-3000:]}"
            rows.append(line.split("\t"))
        return rows

    def close(self) -> None:
        self._in.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class StockAgent(Conversation):
    """Stock clients of one version, connected to a broker."""

    def __init__(self, namesrv: str, version: str, home: Path) -> None:
        super().__init__("Agent", namesrv, sources=SOURCES, version=version, home=home)

    def produce(self, mode: str, topic: str, count: int, prefix: str) -> list[Acknowledged]:
        rows = self.ask("produce", mode, topic, count, prefix)
        assert {row[:2] for row in map(tuple, rows)} == {("SENT", "SEND_OK")}, rows
        return [Acknowledged(int(row[2]), int(row[3]), row[4], base64.b64decode(row[5])) for row in rows]

    def push(self, group: str, topic: str, count: int, *, expression: str = "*", mode: str = "") -> list[Consumed]:
        """Return the messages that a push consumer received until it had `count` of them."""
        found = _got(self.ask("push", group, topic, expression, mode, count, TAKE_S))
        assert len(found) >= count, f"{group} had {len(found)} of {count} messages within {TAKE_S} s"
        return found

    def pair(self, group: str, topic: str, count: int) -> tuple[list[Consumed], int]:
        """Run two members of a group that rebalances; return all messages and the count of the second member."""
        *rows, second = self.ask("pair", group, topic, count, TAKE_S)
        return _got(rows), int(second[1])

    def lite(self, group: str, topic: str, queue_id: int, offset: int, count: int) -> list[Consumed]:
        return _got(self.ask("lite", group, topic, queue_id, offset, count))

    def by_key(self, topic: str, key: str, count: int, begin: int, end: int) -> list[Consumed]:
        return _got(self.ask("key", topic, key, count, begin, end))

    def view(self, topic: str, message_id: str) -> Consumed:
        return _got(self.ask("view", topic, message_id))[0]

    def offset_at(self, topic: str, queue_id: int, time_ms: int) -> int:
        return int(self.ask("time", topic, queue_id, time_ms)[0][1])

    def admin(self, *arguments: object) -> str:
        """Return the output of `mqadmin`."""
        return base64.b64decode(self.ask("admin", *arguments)[0][1]).decode()


def _got(rows: Iterable[list[str]]) -> list[Consumed]:
    return [_message(row[1:]) for row in rows if row[0] == "GOT"]


def _message(row: list[str]) -> Consumed:
    topic, queue_id, offset, retries, flag, sys_flag, born, born_host, stored, *rest = row
    store_host, size, offset_id, unique_id, crc, prepared, properties, body = rest
    return Consumed(
        topic,
        int(queue_id),
        int(offset),
        int(retries),
        flag,
        sys_flag,
        int(born),
        born_host,
        int(stored),
        store_host,
        size,
        offset_id,
        unique_id,
        crc,
        prepared,
        base64.b64decode(properties).decode(),
        base64.b64decode(body),
    )
