"""A neve slave of an Apache master that becomes master in its place, and raw requests that both answer alike."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.wire import Client
from neve.record.codec import MessageRecord, iter_records
from neve.remoting.body import lenient_loads
from tests.servers.apache import ApacheMember, ApacheNameServer
from tests.servers.neve import Serving, settings_as_options
from tests.servers.processes import free_ports
from tests.waiting import wait_until

FILE_SIZE = 4 << 20
DEADLINE_S = 90.0
_ALL_OFFSETS, _HA_STATUS, _POP, _ACK, _END = 43, 907, 200050, 200051, 37
_COMMIT, _ROLLBACK = 8, 12


@dataclass(slots=True)
class Pair:
    """An Apache master and a neve slave under one name server of Apache's."""

    namesrv: str
    master: ApacheMember
    slave: Serving
    directory: Path
    listen: tuple[int, int]

    def settings(self, role: str) -> list[str]:
        port, admin_port = self.listen
        return settings_as_options({
            "brokerRole": role,
            "brokerId": 1 if role == "SLAVE" else 0,
            "brokerName": "stock",
            "namesrvAddr": self.namesrv,
            "storePathRootDir": self.directory / "store",
            "listenPort": port,
            "adminPort": admin_port,
            "bindAddress": "127.0.0.1",
            "brokerIP1": "127.0.0.1",
            "mappedFileSizeCommitLog": FILE_SIZE,
            "registerNameServerPeriod": "10s",
            "slaveReadEnable": "true",
        })  # fmt: skip

    def has_all(self) -> None:
        """Returns when the slave has the master's log, and tables that were asked for after this call."""
        polled = self._polled()
        self.has_log()
        wait_until(lambda: self._polled() >= polled + 2, "the tables", DEADLINE_S)

    def has_log(self) -> None:
        """Returns when the slave has the master's log."""
        wait_until(lambda: self._acks() == [self._end()], "the slave has all of the log", DEADLINE_S)

    def _polled(self) -> float:
        line = next(
            line for line in self.slave.get("/metrics").splitlines() if line.startswith("neve_slave_polls_taken_total ")
        )
        return float(line.rpartition(" ")[2])

    def _status(self) -> dict[str, object]:
        with Client(self.master.broker) as client:
            return dict(json.loads(client.ask(_HA_STATUS, {}).body))

    def _end(self) -> int:
        return int(str(self._status()["masterCommitLogMaxOffset"]))

    def _acks(self) -> list[int]:
        slaves = self._status()["haConnectionInfo"]
        assert isinstance(slaves, list)
        return [int(slave["slaveAckOffset"]) for slave in slaves]

    @contextmanager
    def promoted(self) -> Iterator[Serving]:
        """Where the slave was; it is stopped, and its master is."""
        self.slave.stop()
        with Serving(self.directory, "broker", *self.settings("ASYNC_MASTER")) as master:
            yield master


@contextmanager
def apache_and_slave(directory: Path, **settings: str) -> Iterator[Pair]:
    """With the broker name `stock`."""
    for name in ("names", "apache", "neve"):
        (directory / name).mkdir(parents=True)
    own = {
        "enableControllerMode": "false",
        "brokerId": "0",
        "brokerRole": "ASYNC_MASTER",
        "timerWheelEnable": "true",
        "mappedFileSizeCommitLog": str(FILE_SIZE),
        **settings,
    }
    port, admin_port = free_ports(2)
    with (
        ApacheNameServer(directory / "names") as names,
        ApacheMember(directory / "apache", namesrv=names.namesrv, settings=own) as master,
    ):
        pair = Pair(names.namesrv, master, Serving(directory), directory / "neve", (port, admin_port))
        pair.slave = Serving(directory / "neve", "broker", *pair.settings("SLAVE"))
        with pair.slave:
            yield pair


def offsets_at(address: str) -> dict[str, dict[int, int]]:
    with Client(address) as client:
        table = lenient_loads(client.ask(_ALL_OFFSETS, {}).body)["offsetTable"]
    return {name: {int(queue): offset for queue, offset in queues.items()} for name, queues in table.items()}


def properties(**pairs: object) -> str:
    return "".join(f"{name}\x01{value}\x02" for name, value in pairs.items())


def bodies(address: str, topic: str) -> list[str]:
    """All of queue 0, in its order."""
    with Client(address) as client:
        start, end = client.bounds(topic, 0)
        return [record.body.decode() for record in client.read(topic, 0, start, end - start)]


# ---- transactions


@dataclass(frozen=True, slots=True)
class Half:
    """What ends it."""

    queue_offset: int
    log_offset: int
    unique: str


def prepare(client: Client, topic: str, body: bytes, unique: str) -> Half:
    """A half message, of the producer group g_tx."""
    text = properties(TRAN_MSG="true", PGROUP="g_tx", UNIQ_KEY=unique)
    ext = {"a": "g_tx", "b": topic, "c": "TBW102", "d": 1, "e": 0, "f": 4, "g": int(time.time() * 1000), "h": 0,
           "i": text, "j": 0, "k": "false", "m": "false"}  # fmt: skip
    answer = client.ask(310, ext, body).extFields
    log_offset = int(answer["msgId"][16:32], 16)
    return Half(int(answer["queueOffset"]), log_offset, unique)


def end(client: Client, half: Half, *, commit: bool) -> int:
    ext = {"producerGroup": "g_tx", "tranStateTableOffset": half.queue_offset, "commitLogOffset": half.log_offset,
           "commitOrRollback": _COMMIT if commit else _ROLLBACK, "fromTransactionCheck": "false",
           "msgId": half.unique, "transactionId": half.unique}  # fmt: skip
    return client.invoke(_END, ext).code


# ---- pops


@dataclass(frozen=True, slots=True)
class Popped:
    """One message, and the receipt by which it is acknowledged."""

    record: MessageRecord
    receipt: str

    @property
    def body(self) -> str:
        return self.record.body.decode()


def pop(client: Client, group: str, topic: str, count: int, invisible_ms: int) -> list[Popped]:
    """From queue 0 and the group's pop-retry topic."""
    ext = {"consumerGroup": group, "topic": topic, "queueId": -1, "maxMsgNums": count, "invisibleTime": invisible_ms,
           "pollTime": 0, "bornTime": int(time.time() * 1000), "initMode": 0, "expType": "TAG", "exp": "*",
           "order": "false"}  # fmt: skip
    answer = client.invoke(_POP, ext)
    if answer.code != 0:
        return []
    told = answer.extFields
    starts = {row.split(" ")[0] + row.split(" ")[1]: row.split(" ")[2] for row in told["startOffsetInfo"].split(";")}
    found = list[Popped]()
    for record in iter_records(answer.body):
        retry = "1" if record.topic.startswith("%RETRY%") else "0"
        start = starts.get(f"{retry}{record.queue_id}", "")
        receipt = record.properties.get("POP_CK") or " ".join((
            start, told["popTime"], told["invisibleTime"], told["reviveQid"], retry, "stock", str(record.queue_id),
            str(record.queue_offset),
        ))  # fmt: skip
        found.append(Popped(record, receipt))
    return found


def ack(client: Client, group: str, one: Popped) -> int:
    ext = {"consumerGroup": group, "topic": one.record.topic, "queueId": one.record.queue_id,
           "extraInfo": one.receipt, "offset": one.record.queue_offset}  # fmt: skip
    return client.invoke(_ACK, ext).code
