"""A broker set under Apache's or neve's controllers, as processes: neve's brokers as members, Apache's, or both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

from bench.wire import Client
from tests.kit.clock.waiting import wait_until
from tests.kit.server.apache import ApacheController, ApacheMember, ApacheNameServerAndController, apache_controllers
from tests.kit.server.members import NAME, Members, told_by
from tests.kit.server.neve import Serving, settings_as_options
from tests.kit.server.processes import free_ports

FILE_SIZE = 16 << 20
_HA_STATUS, _ELECT = 907, 1002
_CHANGE_S = 90.0  # An Apache broker learns its master's HA port every ten seconds, and the machine is shared.

Broker = Serving | ApacheMember


class Under(Enum):
    """The kind of controllers that elect, and their location."""

    APACHE = "Apache's"
    APACHE_IN_NAMESRV = "Apache's in its name server"
    NEVE = "neve's"


class MixedSet(Members[Broker]):
    """`neves` neve brokers and `apaches` Apache brokers in one set, whose ports stay the same over restarts.

    Usage:
        with MixedSet(directory, neves=2, apaches=1) as brokers:
            brokers.master.broker            "127.0.0.1:port", once all are in sync
    """

    def __init__(
        self,
        directory: Path,
        *,
        neves: int,
        apaches: int = 0,
        controllers: int = 1,
        under: Under = Under.APACHE,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        """Create a set; `settings` are for neve's brokers. The first started broker is master, preferably Apache's.

        Several `controllers` are Apache's.
        """
        super().__init__(_CHANGE_S)
        self._directory, self._controller_count, self._under = directory, controllers, under
        self._counts = {"apache": apaches, "neve": neves}
        self._settings = settings or {}
        self.controllers: list[ApacheController] = []  # Except neve's own.
        self.addresses: list[str] = []  # The addresses of all controllers.
        self.name_server: Serving | ApacheNameServerAndController
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            start = stack.enter_context
            self._start_requested(stack)
            new: list[Broker] = [self.apache(f"apache{number}") for number in range(self._counts["apache"])]
            new += [self.neve(f"neve{number}") for number in range(self._counts["neve"])]
            for member in new:
                start(member)
                self.members.append(member)
                self.wait_until_in_sync(*self.members)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def _start_requested(self, stack: ExitStack) -> None:
        start = stack.enter_context
        names = {"listenPort": 0, "bindAddress": "127.0.0.1", "kvConfigPath": self._directory / "kv.json"}
        if self._under is Under.APACHE_IN_NAMESRV:
            both = start(ApacheNameServerAndController(self._directory / "namesrv"))
            self.controllers, self.addresses, self.name_server = [both], [both.address], both
            return
        self.name_server = start(Serving(self._directory / "namesrv", "namesrv", *settings_as_options(names)))
        if self._under is Under.NEVE:
            own = {
                "listenPort": free_ports(1)[0],
                "bindAddress": "127.0.0.1",
                "controllerStorePath": self._directory / "register",
            }
            controller = start(Serving(self._directory / "controller", "controller", *settings_as_options(own)))
            self.addresses = [str(controller.ready["controller"])]
        else:
            self.controllers = start(apache_controllers(self._directory / "controllers", self._controller_count))
            self.addresses = [controller.address for controller in self.controllers]

    def apache(self, name: str) -> ApacheMember:
        """Return an Apache member, not started."""
        return ApacheMember(
            self._directory / name,
            namesrv=self.name_server.namesrv,
            controller=";".join(self.addresses),
            name=NAME,
            settings={"minInSyncReplicas": "2", "flushDiskType": "SYNC_FLUSH", "registerNameServerPeriod": "10000"},
        )

    def neve(self, name: str, **settings: object) -> Serving:
        """Return a neve member, not started."""
        port, ha_port, admin_port = free_ports(3)
        own: dict[str, object] = {
            "storePathRootDir": self._directory / name / "store",
            "listenPort": port,
            "haListenPort": ha_port,
            "adminPort": admin_port,
            "bindAddress": "127.0.0.1",
            "brokerIP1": "127.0.0.1",
            "brokerName": NAME,
            "namesrvAddr": self.name_server.namesrv,
            "mappedFileSizeCommitLog": FILE_SIZE,
            "controllerAddr": ";".join(self.addresses),
            "replication": "sync",
            "flushDiskType": "SYNC_FLUSH",
            "apacheMembers": self._counts["apache"] > 0,
        }
        return Serving(self._directory / name, "broker", *settings_as_options({**own, **self._settings, **settings}))

    # -- information from the controllers

    @override
    def told(self) -> dict[str, Any]:
        """Return the leading controller's information about the set; empty while it is unknown, or without leader."""
        return next(filter(None, map(told_by, self.addresses)), {})

    @property
    def leader(self) -> ApacheController:
        """Return the leading controller."""

        def leading() -> ApacheController | None:
            return next((one for one in self.controllers if one.roots and one.leads()), None)

        return self._found(leading, "a controller leads")

    def elect(self, member: Broker) -> None:
        """Elect a member, as `mqadmin electMaster` does."""
        own = {"clusterName": "DefaultCluster", "brokerName": NAME, "brokerId": self.id_of(member)}
        with Client(self.addresses[0] if self._under is Under.NEVE else self.leader.address) as client:
            client.ask(_ELECT, {**own, "designateElect": "true"})


def store_of(member: Broker) -> Path:
    """Return the member's data directory."""
    return member.directory / "store"


def log_of(member: Broker) -> bytes:
    """Return the concatenated log files; unwritten space is zero."""
    return b"".join(path.read_bytes() for path in sorted((store_of(member) / "commitlog").iterdir()))


def end_of(member: Broker) -> int:
    """Return the log end offset, as `mqadmin haStatus` shows it."""
    with Client(member.broker) as client:
        told = json.loads(client.ask(_HA_STATUS, {}).body)
    return int(told["masterCommitLogMaxOffset"] if told["master"] else told["haClientRuntimeInfo"]["maxOffset"])


def assert_same_logs(master: Broker, *slaves: Broker) -> None:
    """Assert byte-identical logs, once all members have caught up with the master."""
    wait_until(lambda: {end_of(slave) for slave in slaves} == {end_of(master)}, "all have all of the log", _CHANGE_S)
    end, wanted = end_of(master), log_of(master)
    assert end > 0
    for slave in slaves:
        assert log_of(slave)[:end] == wanted[:end]
