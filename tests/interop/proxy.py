"""Apache's gRPC proxy 5.3.3 in cluster mode in front of `neve up`: the server for official 5.x clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

from typing_extensions import override

from bench import jvm
from tests.kit.clock.waiting import wait_until
from tests.kit.server.processes import Processes, accepts, free_ports

_READY_S = 180.0  # Long enough for a busy machine.
_FLAGS = ["-Xms128m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]


class ProxyServer(Processes):
    """The proxy with its defaults, except for ports, paths and polling intervals.

    It has no setting for a bind address, so it listens on all interfaces, on free ports.
    """

    def __init__(self, directory: Path, namesrv: str) -> None:
        super().__init__(directory)
        grpc_port, remoting_port = free_ports(2)
        self.endpoints = f"127.0.0.1:{grpc_port}"
        settings = {
            "proxyMode": "CLUSTER",
            "namesrvAddr": namesrv,
            "rocketMQClusterName": "DefaultCluster",
            "grpcServerPort": grpc_port,
            "remotingListenPort": remoting_port,
            "localServeAddr": "127.0.0.1",
            "enablePrintJstack": False,
            "grpcShutdownTimeSeconds": 1,
            # New topics and groups are found soon, and producers are known in time for check-backs.
            "topicRouteServiceCacheRefreshSeconds": 1,
            "transactionHeartbeatPeriodSecond": 1,
        }
        self._config = directory / "proxy.json"
        self._config.write_text(json.dumps(settings))

    @override
    def start(self) -> Self:
        arguments = ["-pc", str(self._config)]
        flags = [*_FLAGS, f"-Drocketmq.log.root={self.directory}"]
        main = "org.apache.rocketmq.proxy.ProxyStartup"
        command = jvm.java(f"{jvm.jars(jvm.PROXY)}/*", main, *arguments, home=self.directory, flags=flags)
        process = self.spawn(command, "proxy.out", {"RMQ_PROXY_HOME": str(self.directory)})

        def is_ready() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"the proxy ended: {self.log('proxy.out')[-4000:]}")
            return "startup successfully" in self.log("proxy.out") and accepts(self.endpoints)

        wait_until(is_ready, "Apache's proxy", _READY_S)
        return self

    @override
    def stop(self) -> int:
        self.kill()  # It has no state to save, and an orderly stop takes 20 s.
        return 0
