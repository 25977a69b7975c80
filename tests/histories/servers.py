"""A broker set of three, its controller and its name server as processes behind links that can be cut.

Servers listen on their own loopback addresses, 127.0.2.x; a member is known by the address of its face, 127.0.3.x with
the same port. Controller and name server have a face for each peer.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.wire import Client, Refused
from broker.ha.master_session import AWAY_TOO_LONG
from tests.histories.clients import now_ms
from tests.histories.faults import CONTROLLER, NAME_SERVER
from tests.histories.history import Switched
from tests.histories.links import Links
from tests.kit.clock.waiting import until
from tests.kit.server.members import NAME, in_sync_in, replicas_in, told_by
from tests.kit.server.neve import NEVE, settings_as_options
from tests.kit.server.processes import Processes, accepts, free_ports
from tests.kit.wire.admin_port import post_request

_ELECT_MASTER, _EPOCH_CACHE, _CLEAN_BROKER_DATA = 1002, 1007, 1011
_ZEROS = 20  # The number of digits in a log file's name.
_READY_S = 60.0
_ASK_S = 2.0
_SWITCH_S = 6.0
_OFFLOAD_S = 10.0
MEMBERS = ("a", "b", "c")
#: Peers with a face of their own at the name server, besides the members.
NEVE_CLIENTS, JAVA_CLIENTS = "neve clients", "java clients"


def log_start(directory: Path) -> int:
    """Return the start of the log's first file."""
    return min((int(path.name) for path in log_file_paths(directory)), default=0)


def log_file_paths(directory: Path) -> list[Path]:
    """Return the files of a CommitLog in order."""
    return sorted(path for path in directory.iterdir() if path.name.isdigit() and len(path.name) == _ZEROS)


class FaultyProcess(Processes):
    """A server that may be killed, frozen and restarted in place, without waiting until it is ready."""

    def __init__(self, name: str, directory: Path, verb: str, settings: Mapping[str, object]) -> None:
        super().__init__(directory)
        self.name = name
        self.is_frozen = False
        self._command = [NEVE, verb, *settings_as_options(settings)]

    @property
    def is_running(self) -> bool:
        return bool(self.roots) and self.roots[0].poll() is None

    @property
    def pids(self) -> list[int]:
        return [root.pid for root in self.roots if root.poll() is None]

    def begin(self) -> None:
        """Start it; nothing of its former process is left."""
        self.kill()
        self.is_frozen = False
        self.spawn(self._command, "neve.log")

    def freeze(self) -> None:
        self.is_frozen = True
        self._to_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self.is_frozen = False
        self._to_all(signal.SIGCONT)

    def _to_all(self, number: int) -> None:
        for root in self.roots:
            with suppress(ProcessLookupError):
                os.killpg(root.pid, number)

    def log_text(self) -> str:
        path = self.directory / "neve.log"
        return path.read_text(errors="replace") if path.exists() else ""


class FaultySet:
    """The broker set; `start` creates and links its parts."""

    def __init__(self, directory: Path, links: Links, settings: Mapping[str, object]) -> None:
        """Create a set; `settings` are keys of all members."""
        self._directory, self._links, self._settings = directory, links, settings
        self.servers: dict[str, FaultyProcess] = {}
        self.name_servers: dict[str, str] = {}  # As each client knows it.
        #: Serializes starts and ends of a server.
        self.turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._is_stopped = False
        self._replacing: dict[str, asyncio.Task[bool]] = {}
        self.put_away: list[Path] = []  # The disks of members that were removed for good.
        self._gone = 0  # The number of members so far.
        self._controller = ""
        self._admin: dict[str, str] = {}  # Of members, if there is an archive.
        self._real: dict[str, str] = {}  # Addresses of members that bypass the links.
        self._face: dict[str, str] = {}

    @property
    def members(self) -> dict[str, FaultyProcess]:
        return {name: self.servers[name] for name in MEMBERS}

    @property
    def log_files(self) -> dict[str, Path]:
        """Return the directories of the members' CommitLogs."""
        return {name: self.data(name) / "commitlog" for name in MEMBERS}

    def data(self, member: str) -> Path:
        """Return the member's data directory."""
        return self._directory / member / "store"

    def owners(self) -> list[tuple[str, int]]:
        """Return the processes of each peer; clients are identified by the process that runs them."""
        return [(name, pid) for name, server in self.servers.items() for pid in server.pids]

    @property
    def store_url(self) -> str:
        """Return the URL of the archive, or "" without one."""
        return str(self._settings.get("storeUrl", ""))

    async def start(self) -> None:
        """Start the set; return when all members are in sync."""
        controller_port, names_port, port, ha_port = free_ports(4)
        real = {CONTROLLER: ("127.0.0.1", controller_port), NAME_SERVER: ("127.0.0.1", names_port)}
        self._controller = f"127.0.0.1:{controller_port}"
        controllers: dict[str, str] = {}
        for name in MEMBERS:
            at = await self._links.face("127.0.0.1", 0, real[CONTROLLER], CONTROLLER, name)
            controllers[name] = f"127.0.0.1:{at}"
        for name in (*MEMBERS, NEVE_CLIENTS, JAVA_CLIENTS):
            at = await self._links.face("127.0.0.1", 0, real[NAME_SERVER], NAME_SERVER, name)
            self.name_servers[name] = f"127.0.0.1:{at}"

        local = {"bindAddress": "127.0.0.1"}
        register = {"listenPort": controller_port, "controllerStorePath": self._directory / "register"}
        names = {"listenPort": names_port, "kvConfigPath": self._directory / "kv.json"}
        self._add(CONTROLLER, "controller", local | register)
        self._add(NAME_SERVER, "namesrv", local | names)
        for number, name in enumerate(MEMBERS, 1):
            host, face = f"127.0.2.{number}", f"127.0.3.{number}"
            (admin_port,) = free_ports(1)
            self._admin[name] = f"127.0.0.1:{admin_port}"
            for each in (port, ha_port):
                await self._links.face(face, each, (host, each), name)
            self._real[name], self._face[name] = f"{host}:{port}", f"{face}:{port}"
            own: dict[str, object] = {
                "brokerName": NAME,
                "brokerIP1": face,
                "bindAddress": host,
                "listenPort": port,
                "haListenPort": ha_port,
                "adminPort": admin_port,
                "storePathRootDir": self.data(name),
                "namesrvAddr": self.name_servers[name],
                "controllerAddr": controllers[name],
            }
            self._add(name, "broker", {**own, **self._settings})
        for server in self.servers.values():
            server.begin()
        await until(lambda: accepts(self._controller), "the controller", _READY_S)
        await self.whole(_READY_S)

    def _add(self, name: str, verb: str, settings: Mapping[str, object]) -> None:
        self.servers[name] = FaultyProcess(name, self._directory / name, verb, settings)

    def stop(self) -> None:
        """Stop everything at once."""
        self._is_stopped = True
        for server in self.servers.values():
            server.kill()

    # -- requests that bypass the links

    async def told(self) -> dict[str, Any]:
        """Return the controller's information about the set; empty while the controller is unreachable."""
        return await asyncio.to_thread(told_by, self._controller, _ASK_S)

    async def master(self) -> str:
        """Return the elected member, or ""."""
        address = (await self.told()).get("masterAddress", "")
        return self._named(address)

    async def epoch(self) -> int:
        """Return the master's epoch; −1 while it is unknown."""
        return int((await self.told()).get("masterEpoch", -1))

    async def is_whole(self) -> bool:
        """Return whether there is a master, and all members are in sync."""
        told = await self.told()
        return bool(told.get("masterAddress")) and in_sync_in(told) == set(self._face.values())

    async def whole(self, within: float) -> None:
        await until(self.is_whole, "all members are in sync", within)

    # -- operators' actions

    async def hand_over(self, master: str, to: str) -> Switched:
        """Ask the master for a switchover, as `neve broker-set switchover` does; `to`: "" for the longest log."""
        return await asyncio.to_thread(self._switch, self._real[master], master, to)

    async def designate(self, to: str) -> Switched:
        """Ask the controller for a forced election, as `mqadmin electMaster` does."""
        return await asyncio.to_thread(self._switch, self._controller, "", to)

    async def replace(self, member: str, forgotten: Callable[[str], None], *, begins: bool = True) -> bool:
        """Replace a member by one with an empty disk, at once or later. Return False if its data are needed.

        In that case the member returns unchanged. The replacement completes even if the caller is cancelled, and once
        for concurrent callers.
        """
        task = self._replacing.get(member)
        if task is None or task.done():
            task = self._replacing[member] = asyncio.create_task(self._replace(member, forgotten, begins))
        return await asyncio.shield(task)

    async def _replace(self, member: str, forgotten: Callable[[str], None], begins: bool) -> bool:
        server = self.servers[member]
        async with self.turns[member]:
            await asyncio.to_thread(server.kill)
            try:
                is_forgotten = await self.forget(member)
                if is_forgotten:
                    forgotten(member)
                return is_forgotten
            finally:
                if begins and not self._is_stopped:
                    await asyncio.to_thread(server.begin)

    async def forget(self, member: str) -> bool:
        """Remove a stopped member from the controller, and put its disk away. Return False if its data are needed.

        In modes that promise to keep acknowledged messages the elected member has them all, so no other one is needed.
        """

        async def is_settled() -> bool:
            told = await self.told()
            alive = {one["brokerAddress"] for one in replicas_in(told) if one["alive"]}
            return told.get("masterAddress") in alive and self._face[member] not in alive

        try:
            await until(is_settled, f"another one leads without {member}", _SWITCH_S)
        except AssertionError:
            return False
        if not await asyncio.to_thread(self._forget, member):
            return False
        self._gone += 1
        aside = self._directory / "aside" / f"{member}-{self._gone}"
        aside.parent.mkdir(exist_ok=True)
        self.data(member).rename(aside)
        self.put_away.append(aside)
        return True

    def _forget(self, member: str) -> bool:
        told = told_by(self._controller, _ASK_S)
        own = [int(one["brokerId"]) for one in replicas_in(told) if one["brokerAddress"] == self._face[member]]
        if not own:
            return False  # Without a name the whole set would be removed.
        ext: dict[str, object] = {
            "clusterName": "DefaultCluster",
            "brokerName": NAME,
            "brokerControllerIdsToClean": ";".join(map(str, own)),
            "isCleanLivingBroker": "false",
        }
        try:
            with Client(self._controller, _SWITCH_S) as client:
                client.ask(_CLEAN_BROKER_DATA, ext)
        except (OSError, Refused):
            return False
        return True

    async def away_too_long(self) -> list[str]:
        """Return members that report missing messages which the master has evicted: an operator has to replace them.

        A member that only reports it is left alone, and never becomes in sync.
        """

        def tells(member: str) -> bool:
            with suppress(OSError), urllib.request.urlopen(f"http://{self._admin[member]}/set", timeout=_ASK_S) as told:
                return AWAY_TOO_LONG in told.read().decode()
            return False

        told = await asyncio.gather(*(asyncio.to_thread(tells, member) for member in self._admin))
        saying = [member for member, is_away in zip(self._admin, told, strict=True) if is_away]
        master = await self.master() if saying else ""
        return [member for member in saying if master and await self._lacks_begin(member, master)]

    async def _lacks_begin(self, member: str, master: str) -> bool:
        """Return whether the log of one member ends below the begin of the other's."""
        try:
            return await self.log_end(member) < log_start(self.log_files[master])
        except (OSError, Refused):
            return False

    async def offload(self, member: str) -> None:
        """Archive everything, including recent messages; do nothing if the member is down or refuses."""

        def post() -> None:
            url = f"http://{self._admin[member]}/archive/offload?roll=1&evict=1"
            with (
                suppress(OSError),
                urllib.request.urlopen(post_request(url), timeout=_OFFLOAD_S) as answer,
            ):
                answer.read()

        await asyncio.to_thread(post)

    def _switch(self, address: str, by: str, to: str) -> Switched:
        before = told_by(self._controller, _ASK_S)
        known = {int(one["brokerId"]): self._named(one["brokerAddress"]) for one in replicas_in(before)}
        ext: dict[str, object] = {"clusterName": "DefaultCluster", "brokerName": NAME, "designateElect": "true"}
        if to:
            ext["brokerId"] = next((number for number, name in known.items() if name == to), -1)
        elected, why = "", ""
        try:
            with Client(address, _SWITCH_S) as client:
                answer = client.ask(_ELECT_MASTER, ext)
            elected = known.get(int(answer.extFields["masterBrokerId"]), "")
        except (OSError, Refused) as error:
            why = str(error)
        then = told_by(self._controller, _ASK_S)
        epochs = [int(told.get("masterEpoch", -1)) for told in (before, then)]
        return Switched(at=now_ms(), by=by, to=elected, why=why, epoch=epochs[0], then=epochs[1])

    def _named(self, face: str) -> str:
        return next((name for name, own in self._face.items() if own == face), "")

    async def log_end(self, member: str) -> int:
        """Return the log end offset that the member reports."""

        def ask() -> int:
            with Client(self._real[member], 5.0) as client:
                return int(json.loads(client.ask(_EPOCH_CACHE, {}).body)["maxOffset"])

        return await asyncio.to_thread(ask)
