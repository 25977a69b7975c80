"""The name server and the controller that `neve up` starts beside the broker are those that run standalone."""

from __future__ import annotations

from pathlib import Path

from broker.config import BrokerConfig
from broker.embedded import HERE, start_controller, start_name_server
from tests.kit.server.processes import accepts


async def test_name_server_and_controller_start_and_the_broker_knows_them(tmp_path: Path) -> None:
    config = BrokerConfig(store_path_root_dir=str(tmp_path / "broker"))
    name_server = await start_name_server(config, tmp_path / "namesrv" / "kvConfig.json", 0)
    controller = await start_controller(config, tmp_path / "controller", 0)
    try:
        assert config.namesrv_addr == f"{HERE}:{name_server.port}"
        assert config.controller_addr == f"{HERE}:{controller.port}"
        assert accepts(config.namesrv_addr)
        assert accepts(config.controller_addr)
    finally:
        await controller.shutdown()
        await name_server.shutdown()
