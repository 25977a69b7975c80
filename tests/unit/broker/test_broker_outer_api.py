"""The connections to name servers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from broker.clients.broker_outer_api import BrokerOuterApi
from broker.config import BrokerConfig
from infra.net.remoting_server import Connection, RemotingServer
from neve.remoting.command import RemotingCommand


async def test_concurrent_calls_share_one_connection_to_a_name_server(tmp_path: Path) -> None:
    def answer(_: Connection, request: RemotingCommand) -> RemotingCommand:
        return RemotingCommand.response(request, 17)

    server = RemotingServer(answer, host="127.0.0.1")
    await server.start()
    config = BrokerConfig(store_path_root_dir=str(tmp_path), namesrv_addr=f"127.0.0.1:{server.port}")
    api = BrokerOuterApi(config, ("127.0.0.1", 1))
    try:
        async with asyncio.timeout(30):
            await asyncio.gather(*(api.route("t") for _ in range(5)))
        assert len(server.connections) == 1
    finally:
        await server.shutdown(0)
