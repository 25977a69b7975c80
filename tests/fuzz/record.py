"""Record the corpus: stock Java clients of RocketMQ 5.3.3 use neve through a proxy that keeps their frames.

    python -m tests.fuzz.record            some minutes; writes tests/fuzz/traffic.xz

The proxy replaces the broker's address with its own in the name server's answers: both have the same number of digits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bench import jvm
from neve.errors import ProtocolError
from neve.remoting.command import RemotingCommand, decode_command
from neve.remoting.frame import FrameDecoder
from tests.fuzz import corpus
from tests.fuzz.corpus import Direction, Recorded
from tests.kit.server.neve import Serving, settings_as_options
from tests.kit.server.processes import free_ports

HERE = Path(__file__).parent
DIALECTS = ("JSON", "ROCKETMQ")
PARTS = ("send", "transaction", "pop", "poporderly", "consume", "reply", "orderly", "sql", "broadcast", "lite")
#: The number of frames kept of one kind, and their maximum length.
SAME_KIND = 2
LENGTH_MAX = 32 * 1024

ADMIN = """
updateTopic -c DefaultCluster -t traffic -r 4 -w 4 -a +reserve.time=72
updateTopicPerm -c DefaultCluster -t traffic -p 6
updateSubGroup -c DefaultCluster -g traffic_plain -r 3
topicList
topicList -c
topicRoute -t traffic
topicStatus -t traffic
topicClusterList -t traffic
brokerStatus -b BROKER
queryMsgByKey -t traffic -k key-1
queryMsgByOffset -t traffic -b broker-a -i 0 -o 0
printMsg -t traffic -d false
printMsgByQueue -t traffic -a broker-a -i 0
sendMsgStatus -b broker-a -c 2
brokerConsumeStats -b BROKER
producerConnection -g traffic_send -t traffic
consumerConnection -g traffic_plain
consumerProgress -g traffic_plain
consumerProgress
consumerStatus -g traffic_plain
cloneGroupOffset -s traffic_plain -d traffic_clone -t traffic
producer -b BROKER
clusterList
updateKvConfig -s fuzz -k one -v two
deleteKvConfig -s fuzz -k one
resetOffsetByTime -g traffic_plain -t traffic -s 1
skipAccumulatedMessage -g traffic_plain -t traffic -f true
updateOrderConf -m get -t traffic -v broker-a:4
cleanExpiredCQ -b BROKER
deleteExpiredCommitLog -b BROKER
cleanUnusedTopic -b BROKER
statsAll -t traffic
getNamesrvConfig
updateNamesrvConfig -k orderMessageEnable -v false
getBrokerConfig -b BROKER
getConsumerConfig -g traffic_plain
updateBrokerConfig -b BROKER -k fileReservedTime -v 72
queryCq -b BROKER -t traffic -q 0 -i 0 -c 4
sendMessage -t traffic -p hello -k key-9 -c even
consumeMessage -t traffic -c 2
haStatus -b BROKER
getBrokerEpoch -b BROKER
wipeWritePerm -b broker-a
addWritePerm -b broker-a
createUser -b BROKER -u someone -p secret1 -t Normal
getUser -b BROKER -u someone
listUser -b BROKER
updateUser -b BROKER -u someone -p secret2
createAcl -b BROKER -s User:someone -r Topic:traffic -a PUB,SUB -d ALLOW
getAcl -b BROKER -s User:someone
listAcl -b BROKER
deleteAcl -b BROKER -s User:someone
deleteUser -b BROKER -u someone
updateTopic -c DefaultCluster -t passing -r 1 -w 1
deleteTopic -c DefaultCluster -t passing
updateSubGroup -c DefaultCluster -g passing
deleteSubGroup -c DefaultCluster -g passing
""".strip().splitlines()
PREPARE = """
updateTopic -c DefaultCluster -t traffic -r 4 -w 4
updateTopic -c DefaultCluster -t requests -r 1 -w 1
setConsumeMode -c DefaultCluster -t traffic -g traffic_pop -m POP -q 4
setConsumeMode -c DefaultCluster -t traffic -g traffic_poporderly -m POP -q 4
""".strip().splitlines()


class Keeper:
    """Decides which frames to keep: a few of each kind."""

    def __init__(self) -> None:
        self.kept: list[Recorded] = []
        self._kinds: Counter[object] = Counter()
        self._lock = threading.Lock()
        self.open_requests: dict[tuple[int, int], int] = {}

    def take(self, connection: int, direction: Direction, frame: bytes) -> None:
        command = decode_command(frame)
        asked = command.code
        with self._lock:
            if command.is_response:
                asked = self.open_requests.pop((connection, command.opaque), 0)
            elif not command.is_oneway:
                self.open_requests[connection, command.opaque] = command.code
            kind = (direction, asked, _shape(command))
            self._kinds[kind] += 1
            if self._kinds[kind] <= SAME_KIND and len(frame) <= LENGTH_MAX:
                self.kept.append(Recorded(direction, frame))


def _shape(command: RemotingCommand) -> tuple[object, ...]:
    fields = tuple(sorted(command.ext))
    return command.serialize_type, command.flag & 3, command.is_response and command.code, fields, command.body[:1]


class Proxy:
    """A proxy between all peers and one server."""

    def __init__(self, target: int, outward: Direction, inward: Direction, keeper: Keeper) -> None:
        self.target, self.outward, self.inward, self.keeper = target, outward, inward, keeper
        self.replaced = (b"", b"")
        self._count = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._count += 1
        number = self._count * 10 + self.outward
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self.target)
        await asyncio.gather(
            self._pump(number, reader, to_writer, self.outward), self._pump(number, to_reader, writer, self.inward)
        )

    async def _pump(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        decoder = FrameDecoder()
        with contextlib.suppress(ConnectionError, ProtocolError):
            while data := await reader.read(1 << 16):
                decoder.receive_data(data)
                while (frame := decoder.next_frame()) is not None:
                    whole = bytes(frame)
                    self.keeper.take(number, direction, whole)
                    writer.write(len(whole).to_bytes(4) + whole.replace(*self.replaced))
                await writer.drain()
        writer.close()


@contextlib.contextmanager
def proxied(keeper: Keeper, namesrv: int, broker: int) -> Iterator[tuple[int, int]]:
    """Return the ports of the proxies for the name server and for the broker."""
    loop = asyncio.new_event_loop()
    ports: list[int] = []
    proxies: list[Proxy] = []

    async def start() -> None:
        for target, outward, inward in (
            (namesrv, Direction.TO_NAME_SERVER, Direction.FROM_NAME_SERVER),
            (broker, Direction.CLIENT_TO_BROKER, Direction.BROKER_TO_CLIENT),
        ):
            proxy = Proxy(target, outward, inward, keeper)
            (port,) = free_ports(1)
            await asyncio.start_server(proxy.serve, "127.0.0.1", port)
            ports.append(port)
            proxies.append(proxy)
        first = proxies[0]
        assert len(str(broker)) == len(str(ports[1]))
        first.replaced = (b"127.0.0.1:%d" % broker, b"127.0.0.1:%d" % ports[1])

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield ports[0], ports[1]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def run_client(home: Path, dialect: str, namesrv: int, *arguments: str) -> None:
    command = jvm.java(jvm.classes(HERE / "java"), "Traffic", f"127.0.0.1:{namesrv}", *arguments, home=home)
    command[1:1] = [f"-Drocketmq.serialize.type={dialect}"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=home,  # consumerStatus leaves a file in its working directory.
        env={**os.environ, "ROCKETMQ_HOME": str(home)},
    )
    print(f"{dialect} {arguments[0]}: exit {done.returncode}", flush=True)
    if done.returncode:
        print(done.stderr[-2000:])


def main() -> None:
    keeper = Keeper()
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        namesrv, broker = free_ports(2)
        settings: dict[str, object] = {
            "transactionCheckInterval": 1000, "transactionTimeOut": 500, "enablePropertyFilter": "true",
            "recallMessageEnable": "true", "mappedFileSizeCommitLog": "4m", "adminPort": -1, "brokerIP1": "127.0.0.1",
        }  # fmt: skip
        with proxied(keeper, namesrv, broker) as (to_namesrv, to_broker):
            settings |= {"namesrvAddr": f"127.0.0.1:{to_namesrv}", "listenPort": broker}
            settings |= {"storePathRootDir": home / "data"}
            theirs = {"listenPort": namesrv, "kvConfigPath": home / "kv.json"}
            with (
                Serving(home / "namesrv", "namesrv", *settings_as_options(theirs)),
                Serving(home / "broker", "broker", *settings_as_options(settings)),
            ):
                for dialect in DIALECTS:
                    record(home, dialect, to_namesrv, to_broker)
    size = corpus.save(keeper.kept)
    codes = sorted({decode_command(item.frame).code for item in keeper.kept if item.direction in (0, 2)})
    print(f"{len(keeper.kept)} frames, {size} bytes; codes {codes}")


def record(home: Path, dialect: str, namesrv: int, broker: int) -> None:
    def admin(lines: list[str]) -> list[str]:
        return [line.replace("BROKER", f"127.0.0.1:{broker}") for line in lines]

    run_client(home, dialect, namesrv, "admin", *admin(PREPARE))
    for part in PARTS:
        run_client(home, dialect, namesrv, part)
    run_client(home, dialect, namesrv, "admin", *admin(ADMIN))


if __name__ == "__main__":
    main()
