"""Unmodified servers of Apache RocketMQ 5.3.3 as processes, and its admin tool."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from typing_extensions import override

from bench import jvm
from bench.wire import Client
from tests.kit.clock.waiting import wait_until
from tests.kit.server.processes import Processes, accepts, free_ports

#: GET_BROKER_CLUSTER_INFO
_CLUSTERS = 106
#: CONTROLLER_GET_NEXT_BROKER_ID
_NEXT_BROKER_ID = 1012
_READY_S = 180.0  # Long enough for a busy machine.
_ADMIN_S = 120.0
#: Apache's broker refuses requests that have waited for 200 ms. On a busy test machine that is no sign of overload.
_PATIENT = {"brokerFastFailureEnable": "false", "osPageCacheBusyTimeOutMills": "60000"}
_MODULE_FLAGS = [
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
]


def _large(heap: str) -> list[str]:
    """Return the JVM options of RocketMQ's own start script, with another heap size."""
    flags = ["-server", f"-Xms{heap}", f"-Xmx{heap}", f"-XX:MaxDirectMemorySize={heap}"]
    flags += ["-XX:+UseG1GC", "-XX:G1HeapRegionSize=16m", "-XX:G1ReservePercent=25", "-XX:+AlwaysPreTouch"]
    return [*flags, "-XX:InitiatingHeapOccupancyPercent=30", "-XX:SoftRefLRUPolicyMSPerMB=0", *_MODULE_FLAGS]


class ApacheServer(Processes):
    """Name server and broker of Apache RocketMQ 5.3.3 with default settings, except for paths, ports and loopback.

    Its HA port has no bind address; it is a free port that no client uses. `quick` starts sooner, runs slower and never
    refuses a request as overload: for tests, not for measurements.
    """

    def __init__(
        self, directory: Path, *, heap: str = "2g", settings: Mapping[str, str] | None = None, quick: bool = False
    ) -> None:
        super().__init__(directory)
        self._quick = ["-XX:TieredStopAtLevel=1", "-XX:-AlwaysPreTouch"] if quick else []
        namesrv_port, broker_port, ha_port = free_ports(3)
        self._heap = heap
        self.namesrv = f"127.0.0.1:{namesrv_port}"
        self.broker = f"127.0.0.1:{broker_port}"
        conf = directory / "conf"
        conf.mkdir(exist_ok=True)
        (conf / "namesrv.conf").write_text(f"bindAddress=127.0.0.1\nlistenPort={namesrv_port}\n")
        broker = {
            "brokerClusterName": "DefaultCluster",
            "brokerName": "stock",
            "brokerId": "0",
            "brokerIP1": "127.0.0.1",
            "brokerIP2": "127.0.0.1",
            "bindAddress": "127.0.0.1",
            "listenPort": str(broker_port),
            "haListenPort": str(ha_port),
            "namesrvAddr": self.namesrv,
            "storePathRootDir": str(directory / "store"),
            "storePathCommitLog": str(directory / "store" / "commitlog"),
            **(_PATIENT if quick else {}),
            **(settings or {}),
        }
        (conf / "broker.conf").write_text("".join(f"{key}={value}\n" for key, value in broker.items()))

    @override
    def start(self) -> Self:
        env = {"ROCKETMQ_HOME": str(self.directory)}
        library = f"{jvm.jars()}/*"
        conf = self.directory / "conf"
        start = "org.apache.rocketmq.{}.{}"
        small = ["-server", "-Xms256m", "-Xmx256m"]
        large = _large(self._heap)
        small += self._quick
        large += self._quick
        namesrv = start.format("namesrv", "NamesrvStartup")
        broker = start.format("broker", "BrokerStartup")
        arguments = ["-c", str(conf / "namesrv.conf")]
        self.spawn(jvm.java(library, namesrv, *arguments, home=self.directory, flags=small), "namesrv.out", env)
        wait_until(lambda: accepts(self.namesrv), "Apache's name server", _READY_S)
        arguments = ["-c", str(conf / "broker.conf")]
        self.spawn(jvm.java(library, broker, *arguments, home=self.directory, flags=large), "broker.out", env)
        wait_until(lambda: accepts(self.broker), "Apache's broker", _READY_S)
        # The port is open seconds before the name server knows the broker.
        with Client(self.namesrv) as routes:
            wait_until(lambda: b'"stock"' in routes.invoke(_CLUSTERS, {}).body, "the broker's registration", _READY_S)
        return self


def mqadmin(namesrv: str, *args: str, home: Path, version: str = jvm.SERVER) -> str:
    """Return the output of the stock admin tool, including errors: it always exits with 0."""
    (home / "conf").mkdir(parents=True, exist_ok=True)
    (home / "conf" / "logback_tools.xml").write_text("<configuration/>")  # 4.x exits without effect if this is unset.
    main = "org.apache.rocketmq.tools.command.MQAdminStartup"
    command = jvm.java(f"{jvm.jars(version)}/*", main, *args, "-n", namesrv, home=home)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_ADMIN_S,
        check=False,
        cwd=home,
        env={**os.environ, "ROCKETMQ_HOME": str(home)},
    )
    # The 5.3 client prints its logging configuration, a line for each step.
    return "\n".join(line for line in (done.stdout + done.stderr).splitlines() if " |-" not in line)


class ApacheNameServer(Processes):
    """Apache's name server 5.3.3 alone."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        (port,) = free_ports(1)
        self.namesrv = f"127.0.0.1:{port}"
        self._conf = directory / "namesrv.conf"
        self._conf.write_text(f"bindAddress=127.0.0.1\nlistenPort={port}\n")

    @override
    def start(self) -> Self:
        flags = ["-Xms128m", "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        main = "org.apache.rocketmq.namesrv.NamesrvStartup"
        command = jvm.java(f"{jvm.jars()}/*", main, "-c", str(self._conf), home=self.directory, flags=flags)
        self.spawn(command, "namesrv.out", {"ROCKETMQ_HOME": str(self.directory)})
        wait_until(lambda: accepts(self.namesrv), "Apache's name server", _READY_S)
        return self


class ApacheController(Processes):
    """A controller of Apache RocketMQ 5.3.3: alone in its DLedger group, or one of several (`apache_controllers`)."""

    _MAIN = "org.apache.rocketmq.controller.ControllerStartup"

    def __init__(
        self,
        directory: Path,
        *,
        own_id: str = "n0",
        group: Mapping[str, str] | None = None,
        more: Mapping[str, object] | None = None,
    ) -> None:
        """Create a controller; `group` has the address of each member by id, `more` has settings."""
        super().__init__(directory)
        group = group or {own_id: f"127.0.0.1:{free_ports(1)[0]}"}
        self.address = group[own_id]
        settings = {
            "controllerDLegerGroup": "neve",
            "controllerDLegerPeers": ";".join(f"{peer}-{address}" for peer, address in group.items()),
            "controllerDLegerSelfId": own_id,
            "controllerStorePath": directory / "store",
            "bindAddress": "127.0.0.1",
            "scanNotActiveBrokerInterval": "1000",
            **(more or {}),
        }
        self._is_alone = len(group) == 1
        self._conf = directory / "controller.conf"
        self._conf.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))

    @override
    def start(self) -> Self:
        flags = ["-Xms128m", "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        command = jvm.java(f"{jvm.jars()}/*", self._MAIN, "-c", str(self._conf), home=self.directory, flags=flags)
        self.spawn(command, "controller.out", {"ROCKETMQ_HOME": str(self.directory)})
        if self._is_alone:
            wait_until(self.leads, "Apache's controller", _READY_S)
        return self

    def leads(self) -> bool:
        """Return whether it leads. The port is open before the election, and the leader decides slightly later."""
        if not accepts(self.address):
            return False
        with Client(self.address) as client:
            return client.invoke(_NEXT_BROKER_ID, {"clusterName": "c", "brokerName": "b"}).code == 0


class ApacheNameServerAndController(ApacheController):
    """Both servers in one process, each on its port: `enableControllerInNamesrv`."""

    _MAIN = "org.apache.rocketmq.namesrv.NamesrvStartup"

    def __init__(self, directory: Path) -> None:
        (port,) = free_ports(1)
        self.namesrv = f"127.0.0.1:{port}"
        super().__init__(directory, more={"enableControllerInNamesrv": "true", "listenPort": port})

    @override
    def start(self) -> Self:
        super().start()
        wait_until(lambda: accepts(self.namesrv), "Apache's name server", _READY_S)
        return self


@contextmanager
def apache_controllers(directory: Path, count: int) -> Iterator[list[ApacheController]]:
    """Run a group of controllers, one of which leads."""
    group = {f"n{number}": f"127.0.0.1:{port}" for number, port in enumerate(free_ports(count))}
    with ExitStack() as stack:
        started = [stack.enter_context(ApacheController(directory / own, own_id=own, group=group)) for own in group]
        wait_until(lambda: any(one.leads() for one in started), "one of Apache's controllers leads", _READY_S)
        yield started


class ApacheMember(Processes):
    """One broker of Apache RocketMQ 5.3.3 in controller mode: its controller makes it master or slave.

    It acknowledges messages that all in-sync replicas have. It polls more often than by default, so that tests are
    quick. It keeps ports and data over a restart.
    """

    def __init__(
        self,
        directory: Path,
        *,
        namesrv: str,
        controller: str = "",
        name: str = "stock",
        settings: Mapping[str, str] = {},
        heap: str = "",
    ) -> None:
        """Create a broker; `heap` selects a server's compiler and collector for measurements, not a quick start."""
        super().__init__(directory)
        self._heap = heap
        port, ha_port = free_ports(2)
        self.broker, self.ha = f"127.0.0.1:{port}", f"127.0.0.1:{ha_port}"
        broker = {
            "brokerClusterName": "DefaultCluster",
            "brokerName": name,
            "brokerIP1": "127.0.0.1",
            "brokerIP2": "127.0.0.1",
            "bindAddress": "127.0.0.1",
            "listenPort": str(port),
            "haListenPort": str(ha_port),
            "namesrvAddr": namesrv,
            "enableControllerMode": "true",
            "controllerAddr": controller,
            "allAckInSyncStateSet": "true",
            "syncBrokerMetadataPeriod": "1000",
            "checkSyncStateSetPeriod": "1000",
            "haSendHeartbeatInterval": "1000",
            "mappedFileSizeCommitLog": str(16 << 20),
            "timerWheelEnable": "false",
            "storePathRootDir": str(directory / "store"),
            "storePathCommitLog": str(directory / "store" / "commitlog"),
            **({} if heap else _PATIENT),
            **settings,
        }
        conf = directory / "conf"
        conf.mkdir(exist_ok=True)
        (conf / "broker.conf").write_text("".join(f"{key}={value}\n" for key, value in broker.items()))

    @override
    def start(self) -> Self:
        flags = ["-server", "-Xms256m", "-Xmx256m", "-XX:MaxDirectMemorySize=256m", "-XX:TieredStopAtLevel=1"]
        flags += ["-XX:+UseSerialGC", *_MODULE_FLAGS]
        if self._heap:
            flags = _large(self._heap)
        library, main = f"{jvm.jars()}/*", "org.apache.rocketmq.broker.BrokerStartup"
        arguments = ["-c", str(self.directory / "conf" / "broker.conf")]
        command = jvm.java(library, main, *arguments, home=self.directory, flags=flags)
        self.spawn(command, "broker.out", {"ROCKETMQ_HOME": str(self.directory)})
        wait_until(lambda: accepts(self.broker), "Apache's broker", _READY_S)
        return self
