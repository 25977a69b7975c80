"""`neve up --replicas 3`: a broker set, its controller and a name server on one machine, to try how a set behaves.

    neve up            this process: the name server, the controller, and the supervisor of the members
    └─ neve broker     one process for each member, over DATA/1, DATA/2, …; its log is broker.log there

A member that ends or is killed is restarted over its directory a few seconds later. If this process dies, its members
end by themselves. All share one disk and one power supply: the set does not survive their loss.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from access.wiring import peer_security
from broker.config import BrokerConfig
from broker.embedded import HERE, share_certificates, start_controller, start_name_server
from broker.ha.settings import settings_of
from infra.config.properties import ConfigError, LoadedConfig, read
from infra.loop.supervisor import Supervisor
from infra.net.remoting_peer import RemotingPeer
from infra.observe import log as logs
from infra.process.server_command import announce, catch_signals
from infra.process.startup import EXIT_CONFIG, EXIT_FAILED, StartupError, free_port
from neve.errors import NeveError
from neve.remoting.body import dumps, loads_as
from neve.remoting.codes import RequestCode

log = logging.getLogger("neve")

PORTS_BETWEEN = 10  # of a member: its own, two below it for old clients, and two above it
MOST_REPLICAS = 7
#: Pause before a restart: long enough for the election of another master.
_AGAIN_S = 5.0
_READY_S = 60.0
_IN_SYNC_S = 60.0
_POLL_S = 0.1
_ASK_S = 3.0
_STOP_S = 60.0
_TOLD = 400  # characters of the last line in a log

#: Keys that each member has for itself.
_OWN = (
    "storePathRootDir",
    "listenPort",
    "haListenPort",
    "adminPort",
    "namesrvAddr",
    "controllerAddr",
    "authConfigPath",
)
_PR_SET_PDEATHSIG = 1


class Places(NamedTuple):
    """Directory and ports of the parts. Port 0 takes any free port."""

    data: Path
    namesrv_port: int
    controller_port: int
    port: int  # of the first member


class _InSync(msgspec.Struct, rename="camel"):
    alive: bool


class _Replicas(msgspec.Struct, rename="camel"):
    in_sync_replicas: list[_InSync]
    master_address: str | None = None


class _SyncStateData(msgspec.Struct, rename="camel"):
    replicas_info_table: dict[str, _Replicas]


def checked(replicas: int, places: Places, store: str | None, settings: Sequence[str]) -> LoadedConfig[BrokerConfig]:
    """Return the configuration that the members share. Raise ConfigError."""
    named = [item.partition("=")[0].strip() for item in settings]
    if own := [key for key in named if key in _OWN]:
        raise ConfigError(*(f"{key} with --replicas: each member has its own" for key in own))
    room = PORTS_BETWEEN * (replicas - 1) + 2
    if places.port + room > 65535:
        raise ConfigError(f"--port {places.port} leaves no ports for {replicas} members")
    own = [f"storePathRootDir={places.data / '1'}", f"controllerAddr={HERE}:{places.controller_port or 1}"]
    loaded = read(BrokerConfig, None, [*_base(places, store), *settings, *own])
    share_certificates(loaded.config)
    if loaded.config.replication == "none":
        raise ConfigError("replication=none with --replicas: nothing would be replicated")
    settings_of(loaded.config)
    return loaded


def _base(places: Places, store: str | None) -> list[str]:
    """Return the defaults that `--set` may override."""
    return [
        f"storeUrl={f'dir:{places.data}/archive' if store is None else store}",
        "archiveMaxAge=10m",
        "replication=sync",
        "brokerIP1=127.0.0.1",
        f"bindAddress={HERE}",
        "mappedFileSizeCommitLog=64m",
    ]


async def run(replicas: int, places: Places, store: str | None, settings: Sequence[str]) -> int:
    """Run the set until a signal. Return the exit code."""
    loaded = checked(replicas, places, store, settings)
    config = loaded.config
    logs.configure(config.log_level, loaded.warnings)
    stopped = asyncio.Event()
    supervisor = Supervisor("up")
    members: list[_Member] = []
    name_server = controller = None
    try:
        settings_path = places.data / "namesrv" / "kvConfig.json"
        name_server = await start_name_server(config, settings_path, places.namesrv_port, of_a_set=True)
        controller = await start_controller(config, places.data / "controller", places.controller_port)
        shared = _shared(config, _base(places, store), settings)
        ports = _ports_of(places, replicas)
        members += (_Member(number, places, shared, ports[number - 1]) for number in range(1, replicas + 1))
        await asyncio.gather(*(member.start() for member in members))
        registered = partial(name_server.routes.member_group, config.broker_cluster_name, config.broker_name)
        master = await _in_sync(config, replicas, registered)
        catch_signals(stopped.set)
        for member in members:
            supervisor.keep(f"member-{member.number}", member.keep)
        announce(
            {
                "namesrv": f"{HERE}:{name_server.port}",
                "controller": f"{HERE}:{controller.port}",
                "master": master,
                "members": [member.as_json() for member in members],
            }
        )
        await stopped.wait()
        return 0
    finally:
        await supervisor.stop()
        await asyncio.gather(*(member.stop() for member in members))
        for server in (controller, name_server):
            if server is not None:
                await server.shutdown()


def _shared(config: BrokerConfig, base: Sequence[str], settings: Sequence[str]) -> list[str]:
    """Return the keys of all members. Later ones override earlier ones."""
    return [
        *base,
        *settings,
        f"tlsEnable={str(config.tls_enable).lower()}",
        f"tlsTrustCertPath={config.tls_trust_cert_path}",
        f"namesrvAddr={config.namesrv_addr}",
        f"controllerAddr={config.controller_addr}",
    ]


def _ports_of(places: Places, replicas: int) -> list[tuple[int, int, int]]:
    """Return the ports of each member: for clients, for slaves, for the admin page.

    Free ports are collected in a dict, because the system may return the same one twice.
    """
    if places.port:
        firsts = [places.port + PORTS_BETWEEN * number for number in range(replicas)]
        return [(first, first + 1, first + 2) for first in firsts]
    free: dict[int, None] = {}
    while len(free) < 3 * replicas:
        free[free_port(HERE)] = None
    ports = list(free)
    return list(zip(ports[::3], ports[1::3], ports[2::3], strict=True))


class _Member:
    """Process of one member."""

    def __init__(self, number: int, places: Places, shared: Sequence[str], ports: tuple[int, int, int]) -> None:
        self.number = number
        self._directory, self._shared = places.data / str(number), shared
        self._port, self._ha_port, self._admin_port = ports  # the same for all restarts
        self._process: asyncio.subprocess.Process | None = None

    def as_json(self) -> dict[str, Any]:
        """Return a description for the ready line."""
        assert self._process is not None
        broker, admin = f"{HERE}:{self._port}", f"{HERE}:{self._admin_port}"
        return {"broker": broker, "admin": admin, "data": str(self._directory), "pid": self._process.pid}

    async def start(self) -> None:
        """Start the process, and wait until it serves. Raise StartupError."""
        own = {
            "storePathRootDir": self._directory,
            "listenPort": self._port,
            "haListenPort": self._ha_port,
            "adminPort": self._admin_port,
        }
        keys = [*self._shared, *(f"{key}={value}" for key, value in own.items())]
        options = [word for key in keys for word in ("--set", key)]
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / "broker.log").open("ab") as err:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", "from neve.cli.main import main; main()", "broker", *options,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=err,
                start_new_session=True,  # Ctrl-C is for this process, which ends the members itself
                preexec_fn=partial(_end_with, os.getpid()),
            )  # fmt: skip
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_READY_S):
                line = await process.stdout.readline()
        except TimeoutError:
            line = b""
        if not line.startswith(b"{"):
            await self.stop()
            raise StartupError(f"member {self.number} did not start: {self._last_line()}", EXIT_FAILED)

    async def keep(self) -> None:
        """Restart the process whenever it ends. Never returns, but raises if a restart fails."""
        while True:
            assert self._process is not None
            status = await self._process.wait()
            log.warning("member %d exited with %d, restart in %.0f s", self.number, status, _AGAIN_S)
            await asyncio.sleep(_AGAIN_S)
            await self.start()
            log.info("member %d restarted, process %d", self.number, self._process.pid)

    async def stop(self) -> None:
        """Stop the process cleanly, or kill it after a timeout."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            log.error("member %d does not stop: killing it", self.number)
            process.kill()
            await process.wait()

    def _last_line(self) -> str:
        path = self._directory / "broker.log"
        lines = path.read_text("utf-8", "replace").splitlines()
        return f"{lines[-1][-_TOLD:]} ({path})" if lines else f"{path} is empty"


def _end_with(parent: int) -> None:
    """Run in the child before the broker: let the kernel end it when its parent dies, for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(EXIT_CONFIG)


async def _in_sync(config: BrokerConfig, replicas: int, registered: Callable[[], dict[str, Any]]) -> str:
    """Return the master's address, once it leads and the controller reports all members in sync. Raise StartupError.

    `registered` returns the brokers at the name server, which has just started. The controller's state alone may be
    from an earlier run of the set.
    """
    controller = RemotingPeer(config.controller_addr, peer_security(config), connect_s=_IN_SYNC_S)
    body = dumps([config.broker_name])
    found: _Replicas | None = None
    try:
        async with asyncio.timeout(_IN_SYNC_S):
            while True:
                addresses = registered()["brokerAddrs"]
                answer = await controller.invoke(RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, {}, body, timeout=_ASK_S)
                found = loads_as(answer.body, _SyncStateData).replicas_info_table.get(config.broker_name)
                if found is not None and len(found.in_sync_replicas) == len(addresses) == replicas:
                    master = addresses.get(0)
                    if master is not None and master == found.master_address:
                        return str(master)
                await asyncio.sleep(_POLL_S)
    except (TimeoutError, OSError, NeveError) as error:
        text = "no master is elected" if found is None else f"{len(found.in_sync_replicas)} of {replicas} are in sync"
        raise StartupError(f"{text} after {_IN_SYNC_S:.0f} s: see broker.log of the members", EXIT_FAILED) from error
    finally:
        controller.close()
