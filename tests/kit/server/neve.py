"""Neve's own servers as processes: `neve up`, and any other command that serves."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

from tests.kit.server.processes import Processes, free_ports
from tests.kit.wire.admin_port import post_request

#: The command of the environment that runs this.
NEVE = str(Path(sys.executable).with_name("neve"))
_LOG = "neve.log"
_ADMIN_S = 120.0


def settings_as_options(settings: Mapping[str, object]) -> list[str]:
    """Return `--set key=value` for each setting."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


class Serving(Processes):
    """`neve VERB …` in `directory`, ready once it prints its JSON line; it may be started again after its end.

    Usage:
        with Serving(directory, "namesrv", *settings_as_options({"listenPort": 0})) as server:
            server.ready["namesrv"]        "127.0.0.1:port"
            server.cpu_seconds()           user + system of all its processes, ended workers included
    """

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        open_files: int | None = None,
        soft: bool = False,
        own_session: bool = True,
    ) -> None:
        super().__init__(directory, own_session=own_session)
        self._command = [NEVE, *arguments]
        if open_files is not None:
            limit = f"ulimit -{'S' if soft else ''}n {open_files}"
            self._command = ["bash", "-c", f'{limit}; exec "$0" "$@"', *self._command]
        self.ready: dict[str, Any] = {}

    @override
    def start(self, env: Mapping[str, str] | None = None) -> Self:
        self.process: subprocess.Popen[str] = self.spawn(self._command, _LOG, env, piped=True)
        self.ready = self.first_line(self.process, _LOG)
        return self

    @property
    def broker(self) -> str:
        """host:port"""
        return str(self.ready["broker"])

    @property
    def namesrv(self) -> str:
        """host:port"""
        return str(self.ready["namesrv"])

    @property
    def admin(self) -> str:
        """host:port"""
        return str(self.ready["admin"])

    @property
    def address(self) -> tuple[str, int]:
        """Return the broker's host:port."""
        host, _, port = self.broker.rpartition(":")
        return host, int(port)

    def get(self, path: str) -> str:
        """Return a page of the admin port."""
        with urllib.request.urlopen(f"http://{self.admin}{path}", timeout=_ADMIN_S) as page:
            return str(page.read().decode())

    def post(self, path: str) -> list[dict[str, Any]]:
        """Return the events with which the admin port answers a command, one per line."""
        with urllib.request.urlopen(post_request(f"http://{self.admin}{path}"), timeout=_ADMIN_S) as answer:
            return [json.loads(line) for line in answer if line.strip()]

    def metric(self, name: str) -> float:
        """Return the current value of a series without labels."""
        for line in self.get("/metrics").splitlines():
            series, _, value = line.rpartition(" ")
            if series == name:
                return float(value)
        raise KeyError(name)


class NeveServer(Serving):
    """`neve up` on free ports, which stay the same over a restart; its data are below `directory`.

    Start it again after `kill` or `stop` to check its recovery.
    """

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        store: str | None = None,
        settings: Mapping[str, object] | None = None,
        own_session: bool = True,
    ) -> None:
        data = directory / "data"
        self.store = store or f"dir:{data}/archive"  # The default of `neve up`.
        namesrv_port, port = free_ports(2)
        options = ["--data", str(data), "--namesrv-port", str(namesrv_port), "--port", str(port)]
        options += ["--store", store] if store is not None else []
        options += [*settings_as_options(settings or {}), *arguments]
        super().__init__(directory, "up", *options, own_session=own_session)
        # Known before the server is ready.
        self.ready = {"namesrv": f"127.0.0.1:{namesrv_port}", "broker": f"127.0.0.1:{port}"}
