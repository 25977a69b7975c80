"""Send requests in wire format, with the broker that answers them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from access.guard import GuardedHandler
from bench.wire import request, send_ext
from broker.broker_controller import BrokerController
from broker.config import BrokerConfig
from broker.machine import Machine
from infra.clock import ManualClock
from infra.disk.filesystem import RealDisk
from infra.net.limits import RemotingLimits
from infra.net.remoting_server import Connection
from neve.record.codec import MessageRecord, decode_record
from neve.remoting.command import RemotingCommand, decode_command

TOPIC = "orders"
UNIQUE = "7F0000010001"
PLAIN: dict[str, dict[str, Any]] = {
    "without properties": {},
    "as a Java client": {"i": f"UNIQ_KEY\x01{UNIQUE}\x02WAIT\x01true\x02"},
    "without the last separator": {"i": f"UNIQ_KEY\x01{UNIQUE}\x02TAGS\x01a"},
    "tags and keys": {"i": f"KEYS\x01k1 k2\x02TAGS\x01tag\x02UNIQ_KEY\x01{UNIQUE}\x02"},
    "other letters": {"i": f"city\x01Zürich ✓ 𝄞\x02UNIQ_KEY\x01{UNIQUE}\x02"},
    "a name without a value": {"i": f"empty\x01\x02UNIQ_KEY\x01{UNIQUE}\x02"},
    "the same name twice": {"i": f"TAGS\x01a\x02TAGS\x01b\x02UNIQ_KEY\x01{UNIQUE}\x02"},
    "an empty id": {"i": "UNIQ_KEY\x01\x02"},
    "flags": {"h": -7, "f": 1},
    "a time out of reach": {"g": 2**62},
    "no wait": {"i": f"WAIT\x01false\x02UNIQ_KEY\x01{UNIQUE}\x02"},
    "reconsumed": {"j": 3},
    "a field of a later version": {"n": "broker-a", "zz": "?"},
}
NOT_PLAIN: dict[str, dict[str, Any]] = {
    "a pair without its separator": {"i": f"what\x02UNIQ_KEY\x01{UNIQUE}\x02"},
    "delayed": {"i": f"DELAY\x013\x02UNIQ_KEY\x01{UNIQUE}\x02"},
    "half": {"i": f"TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01{UNIQUE}\x02"},
    "from another region": {"i": f"MSG_REGION\x01r\x02CLUSTER\x01c\x02UNIQ_KEY\x01{UNIQUE}\x02"},
    "an id to be escaped": {"i": 'UNIQ_KEY\x01a"b\x02'},
    "any queue": {"e": -1},
    "no such queue": {"e": 99},
    "no such topic, not created": {"b": "other", "c": "none"},
    "a topic that is created": {"b": "made-by-a-send"},
    "a retry topic": {"b": "%RETRY%g"},
    "a topic of the broker's own": {"b": "SCHEDULE_TOPIC_XXXX"},
    "a bad name": {"b": "no/good", "c": "TBW102"},
    "no number": {"e": "one"},
    "too large a number": {"h": 2**40},
    "properties too long": {"i": "x\x01" + "y" * 32760 + "\x02"},
    "a batch": {"m": "true"},
    "a missing field": {"a": None},
}

# Adds a signature to the fields of a send.
Signer = Callable[[dict[str, str], bytes], dict[str, Any]]


class Outside:
    """A transport that collects the written bytes."""

    def __init__(self) -> None:
        self.written = b""

    def writelines(self, buffers: list[bytes]) -> None:
        self.written += b"".join(buffers)

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return ("10.0.0.7", 4711)

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None: ...


class SendTarget:
    """A broker that receives sends by the fast path or by the general one."""

    def __init__(self, controller: BrokerController, signer: Signer | None = None) -> None:
        self.controller, self.signer = controller, signer
        self.store = controller.store
        self.dispatched = 0

    def connect(self, *, express: bool) -> tuple[Connection, Outside]:
        router = self.controller.router
        handler = GuardedHandler(self.controller.guard, router)

        def around(connection: Connection, command: RemotingCommand) -> Any:
            self.dispatched += 1
            return handler(connection, command)

        lane = router.express if express else None
        connection, outside = Connection(around, RemotingLimits(), express=lane), Outside()
        connection.connection_made(cast("asyncio.BaseTransport", outside))
        return connection, outside

    def send(self, ext: dict[str, Any], body: bytes, *, express: bool, flag: int = 0) -> tuple[Any, list[Any]]:
        """Return the answer and the stored records, without the fields that differ between any two sends."""
        connection, outside = self.connect(express=express)
        start = self.store.max_physical_offset
        connection.data_received(frame(ext, body, flag, self.signer))
        return plain_answer(outside.written), [plain_record(record) for record in self.stored_from(start)]

    def stored_from(self, start: int) -> list[MessageRecord]:
        found = []
        while (raw := self.store.reader.record_at(start)) is not None:
            found.append(decode_record(raw))
            start += found[-1].size
        return found


def frame(ext: dict[str, Any], body: bytes, flag: int = 0, signer: Signer | None = None) -> bytes:
    fields = {name: value for name, value in {**send_ext(TOPIC, 2), **ext}.items() if value is not None}
    if signer is not None:
        fields = signer({name: str(value) for name, value in fields.items()}, body)
    whole = request(310, 77, fields, body)
    return whole.replace(b'"flag":0', b'"flag":%d' % flag, 1)


def plain_answer(written: bytes) -> Any:
    if not written:
        return None
    command = decode_command(written[4:])
    ext = {name: value for name, value in command.ext.items() if name not in {"msgId", "queueOffset", "transactionId"}}
    return command.code, command.opaque, command.remark, command.flag, ext, sorted(command.ext)


def plain_record(record: MessageRecord) -> Any:
    properties = re.sub(rb"UNIQ_KEY\x01[0-9A-F]{32}", b"UNIQ_KEY\x01made", record.properties_raw)
    return (
        record.topic, record.queue_id, record.flag, record.sys_flag, record.born_timestamp, record.born_host,
        record.store_timestamp, record.store_host, record.reconsume_times, record.body, record.body_crc, properties,
        record.size if b"made" not in properties else None,
    )  # fmt: skip


def with_broker(
    tmp_path: Path,
    work: Callable[[SendTarget], None],
    *,
    signer: Signer | None = None,
    topics: tuple[str, ...] = (TOPIC,),
    **values: Any,
) -> None:
    async def main() -> None:
        config = BrokerConfig()
        config.store_path_root_dir, config.bind_address = str(tmp_path / "store"), "127.0.0.1"
        config.listen_port, config.admin_port, config.mapped_file_size_commit_log = 0, -1, 1 << 24
        for name, value in values.items():
            setattr(config, name, value)
        controller = BrokerController(config, Machine(clock=ManualClock(), disk=RealDisk()))
        await controller.start()
        try:
            broker = SendTarget(controller, signer)
            connection, _ = broker.connect(express=False)
            for topic in topics:  # creates the topic
                connection.data_received(frame({"b": topic}, b"", signer=signer))
            await asyncio.wait(connection.in_flight)
            broker.dispatched = 0
            work(broker)
        finally:
            await controller.shutdown()

    asyncio.run(main())
