"""A broker set as processes: a controller, a name server, and neve's brokers as members."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

from bench.wire import Client, Refused
from tests.kit.clock.waiting import wait_until
from tests.kit.server.members import Members, told_by
from tests.kit.server.neve import Serving, settings_as_options
from tests.kit.server.processes import free_ports

_CHANGE_S = 60.0  # A role change takes less than a second, and the machine is shared.
TOPIC = "orders"


class BrokerSet(Members[Serving]):
    """`members` brokers of one set, whose ports stay the same over restarts.

    Usage:
        with BrokerSet(directory, replication="sync") as brokers:
            brokers.master.broker            "127.0.0.1:port", once all are in sync
    """

    def __init__(
        self,
        directory: Path,
        *,
        members: int = 3,
        controllers: int = 1,
        register_url: str = "",
        settings: Mapping[str, object] | None = None,
        **more: object,
    ):
        """Create a set; `settings` and `more` are keys of all members. Several controllers need `register_url`, an
        etcd."""
        super().__init__(_CHANGE_S)
        local = {"bindAddress": "127.0.0.1"}
        ports = free_ports(controllers)
        self.controllers = []
        for number, port in enumerate(ports):
            register = {"listenPort": port, "controllerStorePath": directory / f"register{number}"}
            own = settings_as_options(local | register | {"registerUrl": register_url})
            self.controllers.append(Serving(directory / f"controller{number}", "controller", *own))
        self.controller = self.controllers[0]  # The controller to ask.
        self.register = directory / "register0"
        names = {"listenPort": 0, "kvConfigPath": directory / "kv.json"}
        self.name_server = Serving(directory / "namesrv", "namesrv", *settings_as_options(local | names))
        self._directory, self._count = directory, members
        self._settings = {**(settings or {}), **more, "controllerAddr": ";".join(f"127.0.0.1:{port}" for port in ports)}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for controller in self.controllers:
                stack.enter_context(controller)
            stack.enter_context(self.name_server)
            for number in range(1, self._count + 1):
                self.members.append(stack.enter_context(self._member(self._directory / str(number))))
            wait_until(lambda: len(self.in_sync()) == self._count, "all are in sync", _CHANGE_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def newcomer(self) -> Serving:
        """Return an additional member with an empty directory, not started."""
        return self._member(self._directory / "newcomer")

    def _member(self, directory: Path) -> Serving:
        port, ha_port, admin_port = free_ports(3)
        own: dict[str, object] = {
            "storePathRootDir": directory / "store",
            "listenPort": port,
            "haListenPort": ha_port,
            "adminPort": admin_port,
            "bindAddress": "127.0.0.1",
            "brokerIP1": "127.0.0.1",
            "namesrvAddr": self.name_server.namesrv,
            "mappedFileSizeCommitLog": "1m",
            # Concurrent tests may delay a process for seconds; tests that freeze one set the detection time themselves.
            "controllerHeartBeatTimeoutMills": "10s",
        }
        return Serving(directory, "broker", *settings_as_options({**own, **self._settings}))

    def another(self, configuration: str) -> Serving:
        """Return an additional member, not started, from a broker.conf without machine-specific keys."""
        directory = self._directory / "another"
        directory.mkdir()
        own = [line for line in configuration.splitlines() if line and not line.endswith("=")]
        (directory / "broker.conf").write_text("\n".join(own))
        port, ha_port = free_ports(2)
        machine: dict[str, object] = {
            "storePathRootDir": directory / "store",
            "listenPort": port,
            "haListenPort": ha_port,
            "adminPort": -1,
            "bindAddress": "127.0.0.1",
            "brokerIP1": "127.0.0.1",
        }
        return Serving(directory, "broker", "-c", str(directory / "broker.conf"), *settings_as_options(machine))

    # -- information from the controller

    @override
    def told(self) -> dict[str, Any]:
        """Return the controller's information about the set; empty while it is unknown."""
        return told_by(self.controller.ready["controller"])


def store_of(member: Serving) -> Path:
    """Return the member's data directory."""
    return member.directory / "store"


# -- senders


def create_topic(brokers: BrokerSet) -> None:
    def is_created() -> bool:
        try:
            with Client(brokers.master.broker) as client:
                client.create_topic(TOPIC, 1)
        except (OSError, Refused):
            return False  # It is elected, and does not lead yet.
        return True

    wait_until(is_created, "a topic")


def takes(member: Serving, body: bytes = b"0") -> bool:
    """Return whether the broker acknowledges a message."""
    try:
        with Client(member.broker) as client:
            client.send(TOPIC, 0, body)
    except (OSError, Refused):
        return False
    return True


class Producer:
    """Sends numbers in order to the current master, each once; a number counts when it is acknowledged."""

    def __init__(self, brokers: BrokerSet) -> None:
        self._brokers = brokers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send_all)
        self._next = 0
        self.acknowledged: list[int] = []
        self.failed: list[BaseException] = []

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Wait until no send is in flight."""
        self._stop.set()
        self._thread.join()

    def _send_all(self) -> None:
        try:
            while not self._stop.is_set():
                for member in self._brokers.members:
                    self._send_while_taken(member)
        except BaseException as error:
            self.failed.append(error)
            raise

    def _send_while_taken(self, member: Serving) -> None:
        try:
            with Client(member.broker, timeout=4) as client:
                while not self._stop.is_set():
                    number, self._next = self._next, self._next + 1
                    client.send(TOPIC, 0, b"%d" % number)
                    self.acknowledged.append(number)
        except (OSError, Refused):
            return  # The broker is down, or a slave.

    def has_sent(self, count: int) -> None:
        """Wait for this many further acknowledgements."""
        wanted = len(self.acknowledged) + count
        wait_until(lambda: len(self.acknowledged) >= wanted, f"{count} more sends are acknowledged", _CHANGE_S)


@contextmanager
def producing(brokers: BrokerSet) -> Iterator[Producer]:
    producer = Producer(brokers)
    producer.begin()
    try:
        yield producer
    finally:
        producer.end()
    assert not producer.failed
