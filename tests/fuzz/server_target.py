"""Damaged frames into a running `neve up`: name server and broker, both of its ports, one by one and many at once.

Beside them a sound client sends and is answered all the while. What it was promised must stand at the end.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Self

import psutil

from bench.wire import Client, request
from neve.errors import ProtocolError
from neve.remoting.command import decode_command
from neve.remoting.frame import FrameDecoder
from tests.fuzz.corpus import Direction, Recorded
from tests.fuzz.mutate import Mutator, seeds_of
from tests.servers.neve import NeveServer
from tests.waiting import wait_until

TOPIC = "sound"
QUEUES = 2
SETTINGS = {
    "archiveMinBytes": "1", "archiveMaxAge": "1s", "archivePeriod": "1s", "mappedFileSizeCommitLog": "8m",
    "enablePropertyFilter": "true", "recallMessageEnable": "true", "transactionCheckInterval": "1000",
}  # fmt: skip
#: A code that nobody serves; its answer says that all before it was handled.
MARKER_CODE, MARKER_OPAQUE = 9_999, 1_999_999_999
PER_CONNECTION = 200
PIPELINED = 16
FATAL_SHARE = 8
PROBE_PERIOD_S = 0.05
#: The server may use so much CPU, or the machine so much time, before a sound request is answered.
PAUSE_CPU_S, PAUSE_WALL_S = 1.0, 30.0
_RESET = struct.pack("ii", 1, 0)


@dataclass
class Figures:
    """What a run saw; the pauses are of the sound client."""

    frames: int = 0
    connections: int = 0
    closed_by_server: int = 0
    probes: int = 0
    longest_pause_s: float = 0.0
    longest_pause_cpu_s: float = 0.0
    anonymous_before: int = 0
    anonymous_after: int = 0
    answers: dict[int, int] = field(default_factory=dict)


class SoundClient(threading.Thread):
    """Sends one message after another, from the first to the last damaged frame."""

    def __init__(self, server: NeveServer, figures: Figures) -> None:
        super().__init__(daemon=True)
        self._server, self._figures = server, figures
        self._process = psutil.Process(server.roots[0].pid)
        self._over = threading.Event()
        self.sent: list[tuple[int, int, bytes]] = []
        self.fault: Exception | None = None
        with Client(server.broker) as client:
            client.create_topic(TOPIC, QUEUES)
            self._send(client)

    def run(self) -> None:
        try:
            with (
                Client(self._server.broker, PAUSE_WALL_S) as broker,
                Client(self._server.namesrv, PAUSE_WALL_S) as names,
            ):
                while not self._over.wait(PROBE_PERIOD_S):
                    self._timed(lambda: self._send(broker))
                    self._timed(lambda: names.ask(106, {}))
        except Exception as error:  # noqa: BLE001 - handed over to the thread that waits
            self.fault = error

    def _timed(self, act: Callable[[], object]) -> None:
        cpu, wall = _cpu(self._process), time.monotonic()
        act()
        figures = self._figures
        figures.probes += 1
        pause = time.monotonic() - wall
        figures.longest_pause_s = max(figures.longest_pause_s, pause)
        figures.longest_pause_cpu_s = max(figures.longest_pause_cpu_s, min(pause, _cpu(self._process) - cpu))

    def _send(self, client: Client) -> None:
        number = len(self.sent)
        queue, body = number % QUEUES, b"sound %d" % number
        self.sent.append((queue, client.send(TOPIC, queue, body), body))

    def end(self) -> None:
        self._over.set()
        self.join(2 * PAUSE_WALL_S)
        if self.fault is not None:
            raise self.fault

    def check_all_there(self) -> None:
        """Every acknowledged message, at its offset, and none twice."""
        with Client(self._server.broker) as client:
            self._send(client)
            for queue in range(QUEUES):
                expected = [(offset, body) for at, offset, body in self.sent if at == queue]
                found = [(r.queue_offset, r.body) for r in client.read(TOPIC, queue, 0, len(expected))]
                assert found == expected, f"queue {queue}: {len(found)} of {len(expected)}"


class Attacker:
    """One connection after another, each until a frame is fatal or PER_CONNECTION were said."""

    def __init__(self, server: NeveServer, corpus: list[Recorded], seed: str, figures: Figures) -> None:
        self._random, self._figures = Random(seed), figures
        to_broker = Mutator(seed, seeds_of(corpus, Direction.CLIENT_TO_BROKER, Direction.BROKER_TO_CLIENT))
        to_names = Mutator(seed, seeds_of(corpus, Direction.TO_NAME_SERVER, Direction.FROM_NAME_SERVER))
        host, _, port = server.broker.rpartition(":")
        names = int(server.namesrv.rpartition(":")[2])
        broker = (host, int(port)), to_broker
        self._targets = [broker, broker, broker, ((host, int(port) - 2), to_broker), ((host, names), to_names)]
        self._marker = request(MARKER_CODE, MARKER_OPAQUE, {})

    def one_connection(self) -> None:
        address, mutator = self._random.choice(self._targets)
        together = self._random.choice((1, PIPELINED))
        self._figures.connections += 1
        with socket.create_connection(address, PAUSE_WALL_S) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            answers = Answers(link, self._figures)
            for _ in range(PER_CONNECTION // together):
                stream, count, is_last = self._group(mutator, together)
                self._figures.frames += count
                try:
                    for piece in mutator.cut(stream if is_last else stream + self._marker):
                        link.sendall(piece)
                    if not is_last:
                        answers.until_marker()
                except ConnectionError:
                    is_last = True
                if is_last:
                    answers.until_quiet()
                    return

    def _group(self, mutator: Mutator, together: int) -> tuple[bytes, int, bool]:
        """Frames up to `together`, or to the first that is fatal to the connection: only the last may be.

        Two in five would be. They are the codec's business more than the handlers': one of FATAL_SHARE is sent.
        """
        parts: list[bytes] = []
        while len(parts) < together:
            stream = mutator.frame()
            if not _is_fatal(stream):
                parts.append(stream)
            elif self._random.randrange(FATAL_SHARE) == 0:
                return b"".join((*parts, stream)), len(parts) + 1, True
        return b"".join(parts), len(parts), False


def _is_fatal(stream: bytes) -> bool:
    """Whether the connection must end with these bytes, or is out of step after them."""
    decoder = FrameDecoder()
    try:
        decoder.receive_data(stream)
        while (frame := decoder.next_frame()) is not None:
            decode_command(frame)
    except ProtocolError:
        return True
    return decoder.pending


class Answers:
    """What comes back on one connection: whole frames, counted by their code."""

    def __init__(self, link: socket.socket, figures: Figures) -> None:
        self._link, self._figures, self._decoder = link, figures, FrameDecoder(1 << 26)

    def until_marker(self) -> None:
        while True:
            data = self._link.recv(1 << 18)
            if not data:
                raise ConnectionResetError("closed by the server")
            if self._take(data):
                return

    def until_quiet(self) -> None:
        """The server closes after a fatal frame; one that has not come whole keeps it waiting, which we do not."""
        self._link.settimeout(0.002)
        with contextlib.suppress(ConnectionError, TimeoutError):
            while data := self._link.recv(1 << 18):
                self._take(data)
            self._figures.closed_by_server += 1

    def _take(self, data: bytes) -> bool:
        marked = False
        self._decoder.receive_data(data)
        while (frame := self._decoder.next_frame()) is not None:
            command = decode_command(frame)
            if command.is_response:
                self._figures.answers[command.code] = self._figures.answers.get(command.code, 0) + 1
            marked = marked or (command.is_response and command.opaque == MARKER_OPAQUE)
        return marked


class Siege:
    """The server, its sound client and the attack; `assert_sound` is what must hold afterwards."""

    def __init__(self, directory: Path, corpus: list[Recorded], seed: str) -> None:
        self.figures = Figures()
        self._server = NeveServer(directory, settings=SETTINGS)
        self._corpus, self._seed = corpus, seed

    def __enter__(self) -> Self:
        self._server.start()
        self._process = psutil.Process(self._server.roots[0].pid)
        self._client = SoundClient(self._server, self.figures)
        self._attacker = Attacker(self._server, self._corpus, self._seed, self.figures)
        self._connections = self._open_connections()
        self.figures.anonymous_before = self.anonymous_bytes()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.stop()

    def attack(self, frames: int, told_every: int = 0) -> None:
        """Send so many, with the sound client beside; raises what that client met."""
        self._client.start()
        told = 0
        while self.figures.frames < frames and self._client.fault is None:
            self._attacker.one_connection()
            if told_every and self.figures.frames - told >= told_every:
                told = self.figures.frames
                print(f"server: {told} frames, longest pause {self.figures.longest_pause_s:.3f} s", file=sys.stderr)
        self._client.end()

    def assert_sound(self, growth_limit: int) -> None:
        """Answers came in time, memory is bounded, nothing leaks, nothing unforeseen was logged, nothing is lost."""
        wait_until(lambda: self._open_connections() <= self._connections, "the connections are closed")
        figures = self.figures
        figures.anonymous_after = self.anonymous_bytes()
        self._client.check_all_there()
        log = self._server.log()
        assert "Traceback" not in log, log[log.index("Traceback") - 2000 :][:6000]
        assert figures.longest_pause_cpu_s < PAUSE_CPU_S, figures
        assert figures.anonymous_after - figures.anonymous_before < growth_limit, figures
        assert self._server.stop() == 0
        self._server.start()
        self._client.check_all_there()  # nothing that was taken in keeps the next start from serving
        assert "Traceback" not in self._server.log()

    def anonymous_bytes(self) -> int:
        """Memory of its own; pages of mapped files are the kernel's to take."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no RssAnon")

    def _open_connections(self) -> int:
        """Of the network: the archive's workers come and go over sockets of another kind."""
        return len(self._process.net_connections("inet"))


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
