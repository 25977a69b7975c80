"""A neve slave of an Apache master that is promoted, and raw requests that both brokers answer alike."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.wire import SEND_V2, Client, send_ext
from neve.record.codec import MessageRecord, iter_records
from neve.remoting.body import lenient_loads
from tests.kit.clock.waiting import wait_until
from tests.kit.server.apache import ApacheMember, ApacheNameServer
from tests.kit.server.neve import Serving, settings_as_options
from tests.kit.server.processes import free_ports

FILE_SIZE = 4 << 20
_POLLS = "neve_slave_polls_taken_total"
DEADLINE_S = 90.0
_ALL_OFFSETS, _HA_STATUS, _POP, _ACK, _END = 43, 907, 200050, 200051, 37
_PREPARED, _COMMIT, _ROLLBACK = 4, 8, 12
_GROUP = "g_tx"


@dataclass(slots=True)
class ApacheAndSlave:
    """An Apache master and a neve slave, registered with Apache's name server."""

    namesrv: str
    master: ApacheMember
    slave: Serving
    directory: Path
    listen: tuple[int, int]

    def settings(self, role: str) -> list[str]:
        return settings_as_options(settings_of(self.namesrv, self.directory, self.listen, role))

    def has_all(self) -> None:
        """Return when the slave has the master's log, and tables requested after this call."""
        polled = self.slave.metric(_POLLS)
        self.has_log()
        wait_until(lambda: self.slave.metric(_POLLS) >= polled + 2, "the tables", DEADLINE_S)

    def has_log(self) -> None:
        """Return when the slave has the master's log."""
        catches_up(self.master.broker)

    @contextmanager
    def promoted(self) -> Iterator[Serving]:
        """Return the promoted broker, in the slave's directory; the slave and its master are stopped."""
        self.slave.stop()
        with Serving(self.directory, "broker", *self.settings("ASYNC_MASTER")) as master:
            yield master


def settings_of(namesrv: str, directory: Path, listen: tuple[int, int], role: str = "SLAVE") -> dict[str, object]:
    """Return the settings of a neve broker beside an Apache master, or in place of it."""
    port, admin_port = listen
    return {
        "brokerRole": role,
        "brokerId": 1 if role == "SLAVE" else 0,
        "brokerName": "stock",
        "namesrvAddr": namesrv,
        "storePathRootDir": directory / "store",
        "listenPort": port,
        "adminPort": admin_port,
        "bindAddress": "127.0.0.1",
        "brokerIP1": "127.0.0.1",
        "mappedFileSizeCommitLog": FILE_SIZE,
        "registerNameServerPeriod": "10s",
        "slaveReadEnable": "true",
    }


@contextmanager
def apache_and_slave(directory: Path, **settings: str) -> Iterator[ApacheAndSlave]:
    """Run both with the broker name `stock`."""
    with apache_alone(directory, **settings) as pair:
        pair.slave = Serving(pair.directory, "broker", *pair.settings("SLAVE"))
        with pair.slave:
            yield pair


@contextmanager
def apache_alone(directory: Path, **settings: str) -> Iterator[ApacheAndSlave]:
    """Run the master alone; its slave has ports and a directory, but is not started."""
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
        yield ApacheAndSlave(names.namesrv, master, Serving(directory / "neve"), directory / "neve", (port, admin_port))


def catches_up(master: str) -> int:
    """Return the log end offset of the master once its slaves have all of its log."""
    ends = list[int]()

    def has_all() -> bool:
        told = json.loads(_asked(master, _HA_STATUS))
        ends[:] = [int(told["masterCommitLogMaxOffset"])]
        return [int(slave["slaveAckOffset"]) for slave in told["haConnectionInfo"]] == ends

    wait_until(has_all, "the slave has all of the log", DEADLINE_S)
    return ends[0]


def loses(store: Path, kept: int, end: int) -> None:
    """Simulate a power cut that lost the log from `kept` on, and all derived files.

    In the log's first file the bytes from `kept` to `end` are lost; later files are lost whole.
    """
    first, *rest = sorted((store / "commitlog").iterdir())
    with first.open("r+b") as file:
        file.seek(kept)
        file.write(bytes(end - kept))
    for path in rest:
        path.unlink()
    (store / "checkpoint").unlink(missing_ok=True)
    for name in ("consumequeue", "index"):
        shutil.rmtree(store / name, ignore_errors=True)


def _asked(address: str, code: int) -> bytes:
    with Client(address) as client:
        return client.ask(code, {}).body


def offsets_at(address: str) -> dict[str, dict[int, int]]:
    """Return the committed offsets of every group, by topic@group and queue."""
    table = lenient_loads(_asked(address, _ALL_OFFSETS))["offsetTable"]
    return {name: {int(queue): offset for queue, offset in queues.items()} for name, queues in table.items()}


def properties(**pairs: object) -> str:
    return "".join(f"{name}\x01{value}\x02" for name, value in pairs.items())


def bodies(address: str, topic: str) -> list[str]:
    """Return the bodies in queue 0, in order."""
    with Client(address) as client:
        start, end = client.bounds(topic, 0)
        return [record.body.decode() for record in client.read(topic, 0, start, end - start)]


# ---- transactions


@dataclass(frozen=True, slots=True)
class Half:
    """The fields that end a half message's transaction."""

    queue_offset: int
    log_offset: int
    unique: str


def prepare(client: Client, topic: str, body: bytes, unique: str) -> Half:
    """Send a half message."""
    text = properties(TRAN_MSG="true", PGROUP=_GROUP, UNIQ_KEY=unique)
    born = {"g": int(time.time() * 1000)}  # Apache's broker discards one that was born before `fileReservedTime`.
    answer = client.ask(SEND_V2, {**send_ext(topic, 0, text), **born, "a": _GROUP, "f": _PREPARED}, body).extFields
    log_offset = int(answer["msgId"][16:32], 16)
    return Half(int(answer["queueOffset"]), log_offset, unique)


def end(client: Client, half: Half, *, commit: bool) -> int:
    ext = {"producerGroup": _GROUP, "tranStateTableOffset": half.queue_offset, "commitLogOffset": half.log_offset,
           "commitOrRollback": _COMMIT if commit else _ROLLBACK, "fromTransactionCheck": "false",
           "msgId": half.unique, "transactionId": half.unique}  # fmt: skip
    return client.invoke(_END, ext).code


# ---- pops


@dataclass(frozen=True, slots=True)
class PoppedMessage:
    """A message, and the receipt that acknowledges it."""

    record: MessageRecord
    receipt: str

    @property
    def body(self) -> str:
        return self.record.body.decode()


def pop(client: Client, group: str, topic: str, count: int, invisible_ms: int) -> list[PoppedMessage]:
    """Pop from queue 0 and the group's pop-retry topic."""
    ext = {"consumerGroup": group, "topic": topic, "queueId": -1, "maxMsgNums": count, "invisibleTime": invisible_ms,
           "pollTime": 0, "bornTime": int(time.time() * 1000), "initMode": 0, "expType": "TAG", "exp": "*",
           "order": "false"}  # fmt: skip
    answer = client.invoke(_POP, ext)
    if answer.code != 0:
        return []
    told = answer.extFields
    starts = {row.split(" ")[0] + row.split(" ")[1]: row.split(" ")[2] for row in told["startOffsetInfo"].split(";")}
    found = list[PoppedMessage]()
    for record in iter_records(answer.body):
        retry = "1" if record.topic.startswith("%RETRY%") else "0"
        start = starts.get(f"{retry}{record.queue_id}", "")
        receipt = record.properties.get("POP_CK") or " ".join((
            start, told["popTime"], told["invisibleTime"], told["reviveQid"], retry, "stock", str(record.queue_id),
            str(record.queue_offset),
        ))  # fmt: skip
        found.append(PoppedMessage(record, receipt))
    return found


def ack(client: Client, group: str, one: PoppedMessage) -> int:
    ext = {"consumerGroup": group, "topic": one.record.topic, "queueId": one.record.queue_id,
           "extraInfo": one.receipt, "offset": one.record.queue_offset}  # fmt: skip
    return client.invoke(_ACK, ext).code
