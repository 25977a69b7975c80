"""`neve namesrv`, alone and with a controller in its process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from controller.controller_config import ControllerConfig
from infra.config.properties import LoadedConfig
from infra.observe import log as logs
from namesrv import command
from namesrv.namesrv_config import NamesrvConfig
from namesrv.namesrv_controller import NamesrvController
from tests.kit.server.processes import free_ports

_ALONE = """
import os, signal, sys
from namesrv import command
from infra.process import server_command

def announced(ready):
    print(sorted(name for name in sys.modules if name.startswith("controller.")), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

command.announce = announced
command.namesrv(["--set", "listenPort=0", "--set", "bindAddress=127.0.0.1", "--set", "kvConfigPath=" + sys.argv[1]])
"""


def test_standalone_name_server_loads_no_controller(tmp_path: Path) -> None:
    async def main() -> bytes:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _ALONE, str(tmp_path / "kv.json"), stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(60):
            said, _ = await process.communicate()
        assert process.returncode == 0
        return said

    assert asyncio.run(main()).decode().strip() == "['controller.controller_config']"


@pytest.mark.parametrize("when", ["start", "shutdown"])
async def test_failing_name_server_stops_its_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    async def fails(_: NamesrvController) -> None:
        raise OSError(f"no {when}")

    monkeypatch.setattr(NamesrvController, when, fails)
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    monkeypatch.setattr(command, "announce", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    (port,) = free_ports(1)
    own = NamesrvConfig(listen_port=0, bind_address="127.0.0.1", kv_config_path=str(tmp_path / "kv.json"))
    beside = ControllerConfig(
        listen_port=port, bind_address="127.0.0.1", controller_store_path=str(tmp_path / "controller")
    )

    with pytest.raises(OSError, match=f"no {when}"):
        await command._run(LoadedConfig(own, ()), LoadedConfig(beside, ()))
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
