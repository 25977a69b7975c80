"""Damaged frames sent to both ports of a running `neve up`, name server and broker, sequentially and concurrently.

Meanwhile a regular client sends and has to be answered. At the end all its acknowledged messages must be stored.
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
from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import NeveServer

TOPIC = "sound"
QUEUES = 2
SETTINGS = {
    "archiveMinBytes": "1", "archiveMaxAge": "1s", "archivePeriod": "1s", "mappedFileSizeCommitLog": "8m",
    "enablePropertyFilter": "true", "recallMessageEnable": "true", "transactionCheckInterval": "1000",
}  # fmt: skip
#: A code that no server supports; its answer shows that all requests before it were handled.
MARKER_CODE, MARKER_OPAQUE = 9_999, 1_999_999_999
PER_CONNECTION = 200
PIPELINED = 16
FATAL_SHARE = 8
PROBE_PERIOD_S = 0.05
#: The CPU time of the server, or the time of the machine, within which a regular request must be answered.
PAUSE_CPU_S, PAUSE_WALL_S = 1.0, 30.0
_RESET = struct.pack("ii", 1, 0)


@dataclass
class ServerFigures:
    """The counts of a run; the pauses are those of the regular client."""

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

    def __init__(self, server: NeveServer, figures: ServerFigures) -> None:
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
        """Check that every acknowledged message is at its offset, and that none occurs twice."""
        with Client(self._server.broker) as client:
            self._send(client)
            for queue in range(QUEUES):
                expected = [(offset, body) for at, offset, body in self.sent if at == queue]
                found = [(r.queue_offset, r.body) for r in client.read(TOPIC, queue, 0, len(expected))]
                assert found == expected, f"queue {queue}: {len(found)} of {len(expected)}"


class Attacker:
    """Opens one connection after another, each until a frame is fatal or PER_CONNECTION frames were sent."""

    def __init__(self, server: NeveServer, corpus: list[Recorded], seed: str, figures: ServerFigures) -> None:
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
        """Return up to `together` frames, or fewer if one is fatal to the connection, which must be the last.

        Two in five frames would be fatal. They test the codec more than the handlers, so only one in FATAL_SHARE is
        sent.
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
    """Return whether the connection must end at these bytes, or is out of step after them."""
    decoder = FrameDecoder()
    try:
        decoder.receive_data(stream)
        while (frame := decoder.next_frame()) is not None:
            decode_command(frame)
    except ProtocolError:
        return True
    return decoder.pending


class Answers:
    """The answers on one connection: whole frames, counted by their code."""

    def __init__(self, link: socket.socket, figures: ServerFigures) -> None:
        self._link, self._figures, self._decoder = link, figures, FrameDecoder(1 << 26)

    def until_marker(self) -> None:
        while True:
            data = self._link.recv(1 << 18)
            if not data:
                raise ConnectionResetError("closed by the server")
            if self._take(data):
                return

    def until_quiet(self) -> None:
        """Read until the server closes the connection or has answered everything.

        The server closes after a fatal frame. It waits for the rest of an incomplete frame, and this function does not.
        """
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
    """The server, its regular client and the attack; `assert_sound` checks the state afterwards."""

    def __init__(self, directory: Path, corpus: list[Recorded], seed: str) -> None:
        self.figures = ServerFigures()
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
        """Send that many frames, with the regular client in parallel; raise the errors of that client."""
        self._client.start()
        told = 0
        while self.figures.frames < frames and self._client.fault is None:
            self._attacker.one_connection()
            if told_every and self.figures.frames - told >= told_every:
                told = self.figures.frames
                print(f"server: {told} frames, longest pause {self.figures.longest_pause_s:.3f} s", file=sys.stderr)
        self._client.end()

    def assert_sound(self, growth_limit: int) -> None:
        """Assert timely answers, bounded memory, no leaks, no unexpected log lines and no lost messages."""
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
        self._client.check_all_there()  # No accepted request prevents the next start from serving.
        assert "Traceback" not in self._server.log()

    def anonymous_bytes(self) -> int:
        """Return its anonymous memory; the kernel can reclaim pages of mapped files."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no RssAnon")

    def _open_connections(self) -> int:
        """Return the number of network connections; the archive's workers use other kinds of sockets."""
        return len(self._process.net_connections("inet"))


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
