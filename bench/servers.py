"""Brokers as processes: `neve up`, and Apache RocketMQ 5.3.3 as it comes. On loopback, in sessions of their own.

Usage:
    with NeveServer(directory, store="dir:/tmp/archive") as server:
        server.namesrv, server.broker      "127.0.0.1:port"
        server.cpu_seconds()               user + system of all its processes, ended workers included
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Self

import psutil

from bench import jvm
from bench.wire import Client

#: The command of the environment that runs this.
NEVE = str(Path(sys.executable).with_name("neve"))
#: GET_BROKER_CLUSTER_INFO
_CLUSTERS = 106
_READY_S = 60.0
_JAVA_READY_S = 180.0  # of a busy machine
_STOP_S = 30.0
_ADMIN_S = 120.0
_MODULE_FLAGS = [
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
]


def free_ports(count: int) -> list[int]:
    """Ports that are free now, with port − 2 free as well: RocketMQ clients may go to a broker's VIP port."""
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            below = stack.enter_context(socket.socket())
            try:
                below.bind(("127.0.0.1", port - 2))
            except OSError:
                continue
            ports.append(port)
    return ports


def wait_until(condition: Callable[[], bool], what: str, timeout: float = _READY_S, step: float = 0.05) -> None:
    """Returns once `condition` holds; a deadline instead of a guess how long something takes."""
    deadline = time.monotonic() + timeout
    tick = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout:.0f} s")
        tick.wait(step)


def accepts(address: str) -> bool:
    """Whether something listens there."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, int(port))) == 0


class Processes:
    """The processes of one server: ended or killed together, their CPU time summed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.roots: list[subprocess.Popen[str]] = []
        directory.mkdir(parents=True, exist_ok=True)

    def spawn(
        self, command: list[str], log: str, env: Mapping[str, str] | None = None, *, piped: bool = False
    ) -> subprocess.Popen[str]:
        with (self.directory / log).open("a") as err:
            out: int | IO[str] = subprocess.PIPE if piped else err
            process = subprocess.Popen(
                command, stdout=out, stderr=err, text=True, start_new_session=True, env={**os.environ, **(env or {})}
            )
        self.roots.append(process)
        return process

    def first_line(self, process: subprocess.Popen[str], log: str) -> dict[str, Any]:
        """The JSON line by which a server says that it is ready; one that doesn't is killed, its log told."""
        assert process.stdout is not None
        out = process.stdout
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.append(out.readline()), daemon=True)
        reader.start()
        reader.join(_READY_S)
        if not lines or not lines[0].startswith("{"):
            self.kill()
            raise RuntimeError(f"{process.args!r} did not get ready: {lines}\n{self.log(log)[-4000:]}")
        ready: dict[str, Any] = json.loads(lines[0])
        return ready

    def log(self, name: str = "neve.log") -> str:
        return (self.directory / name).read_text(errors="replace")

    def alive(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for root in self.roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(root.pid)
                found += [process, *process.children(recursive=True)]
        return found

    def cpu_seconds(self) -> float:
        """User and system time; what ended workers used is in their parent's children times."""
        total = 0.0
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def signal(self, number: int) -> None:
        for root in self.roots:
            with contextlib.suppress(ProcessLookupError):
                os.kill(root.pid, number)

    def kill(self) -> None:
        """SIGKILL to all of them at once, the way a machine's owner pulls the plug on a program."""
        victims = self.alive()
        for root in self.roots:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(root.pid, signal.SIGKILL)
        for victim in victims:  # a worker may have a session of its own
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        self._reap()

    def stop(self) -> int:
        """SIGTERM, last started first; SIGKILL for what does not end. Returns the exit status of the last started."""
        status = 0
        for root in reversed(self.roots):
            with contextlib.suppress(ProcessLookupError):
                os.kill(root.pid, signal.SIGTERM)
            try:
                status = root.wait(_STOP_S) or status
            except subprocess.TimeoutExpired:
                status = -signal.SIGKILL
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(root.pid, signal.SIGKILL)
        self._reap()
        return status

    def _reap(self) -> None:
        for root in self.roots:
            root.wait()
            if root.stdout is not None:
                root.stdout.close()
        self.roots.clear()


class NeveServer(Processes):
    """`neve up` on `directory`; start again after `kill` or `stop` to find out what the disk still knows."""

    def __init__(self, directory: Path, *, store: str | None = None, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(directory)
        namesrv_port, broker_port = free_ports(2)
        self._store = store or f"dir:{directory / 'archive'}"
        self._settings = dict(settings or {})
        self._namesrv_port, self._broker_port = namesrv_port, broker_port
        self.ready: dict[str, Any] = {}
        self.namesrv = f"127.0.0.1:{namesrv_port}"
        self.broker = f"127.0.0.1:{broker_port}"
        self.admin = ""

    @property
    def store(self) -> str:
        return self._store

    def start(self, env: Mapping[str, str] | None = None) -> Self:
        command = [NEVE, "up", "--data", str(self.directory / "data")]
        command += ["--store", self._store, "--namesrv-port", str(self._namesrv_port), "--port", str(self._broker_port)]
        for key, value in self._settings.items():
            command += ["--set", f"{key}={value}"]
        process = self.spawn(command, "neve.log", env, piped=True)
        self.ready = self.first_line(process, "neve.log")
        self.namesrv, self.broker = str(self.ready["namesrv"]), str(self.ready["broker"])
        self.admin = str(self.ready["admin"]).removeprefix("http://").rstrip("/")
        return self

    def metric(self, name: str) -> float:
        """What the admin port says now of a series without labels."""
        with urllib.request.urlopen(f"http://{self.admin}/metrics", timeout=_ADMIN_S) as page:
            for line in page.read().decode().splitlines():
                series, _, value = line.rpartition(" ")
                if series == name:
                    return float(value)
        raise KeyError(name)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


class ApacheServer(Processes):
    """Name server and broker of Apache RocketMQ 5.3.3, default settings but for paths, ports and loopback.

    Its HA port knows no bind address; it is a free port, and nobody connects to it. `quick` starts sooner and runs
    slower: for tests, not for measurements.
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
            **(settings or {}),
        }
        (conf / "broker.conf").write_text("".join(f"{key}={value}\n" for key, value in broker.items()))

    def start(self) -> Self:
        env = {"ROCKETMQ_HOME": str(self.directory)}
        library = f"{jvm.jars()}/*"
        conf = self.directory / "conf"
        start = "org.apache.rocketmq.{}.{}"
        small = ["-server", "-Xms256m", "-Xmx256m"]
        large = ["-server", f"-Xms{self._heap}", f"-Xmx{self._heap}", f"-XX:MaxDirectMemorySize={self._heap}"]
        large += ["-XX:+UseG1GC", "-XX:G1HeapRegionSize=16m", "-XX:G1ReservePercent=25", "-XX:+AlwaysPreTouch"]
        large += ["-XX:InitiatingHeapOccupancyPercent=30", "-XX:SoftRefLRUPolicyMSPerMB=0", *_MODULE_FLAGS]
        small += self._quick
        large += self._quick
        namesrv = start.format("namesrv", "NamesrvStartup")
        broker = start.format("broker", "BrokerStartup")
        arguments = ["-c", str(conf / "namesrv.conf")]
        self.spawn(jvm.java(library, namesrv, *arguments, home=self.directory, flags=small), "namesrv.out", env)
        wait_until(lambda: accepts(self.namesrv), "Apache's name server", _JAVA_READY_S)
        arguments = ["-c", str(conf / "broker.conf")]
        self.spawn(jvm.java(library, broker, *arguments, home=self.directory, flags=large), "broker.out", env)
        wait_until(lambda: accepts(self.broker), "Apache's broker", _JAVA_READY_S)
        # The port is open seconds before the name server knows the broker.
        with Client(self.namesrv) as asking:
            wait_until(
                lambda: b'"stock"' in asking.invoke(_CLUSTERS, {}).body, "the broker's registration", _JAVA_READY_S
            )
        return self

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.kill()  # what was started must not outlive what it was started for
            raise

    def __exit__(self, *exc: object) -> None:
        self.stop()


def mqadmin(namesrv: str, *args: str, home: Path, version: str = jvm.SERVER) -> str:
    """Output of the stock admin tool, errors included: it exits with 0 whatever happens."""
    (home / "conf").mkdir(parents=True, exist_ok=True)
    (home / "conf" / "logback_tools.xml").write_text("<configuration/>")  # 4.x does nothing without it
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
    # The 5.3 client prints how its logging was configured, a line for each step.
    return "\n".join(line for line in (done.stdout + done.stderr).splitlines() if " |-" not in line)
