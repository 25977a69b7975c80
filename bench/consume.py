"""Read a backlog of 1 KiB messages from the start: neve and Apache RocketMQ 5.3.3 alternate, with default settings.

It is read by a push consumer of the stock Java client, and by one connection with a pull of 32 messages in flight for
each queue. Every run is a new group on the same backlog, which is in the page cache on both sides. For each run of neve
the answering tier is printed: on a full disk the backlog is evicted, and the figures are those of the archive.
"""

from __future__ import annotations

import subprocess

from bench.measure import (
    SIZE,
    Rate,
    Server,
    Table,
    arguments,
    java_command,
    raw_command,
    run_window,
    settle,
    side_by_side,
)
from bench.raw_load import create
from tests.kit.server.apache import ApacheServer


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000, help="length of the backlog")
    options = parser.parse_args()
    table = Table(f"Consume a backlog of {options.messages:,} x {SIZE} B")
    with side_by_side(options) as servers:
        for server in servers.values():
            create(server.broker, "backlog")
            subprocess.run(raw_command("fill", server.broker, "backlog", SIZE, options.messages), check=True)
        for turn in range(options.repeat):
            names = sorted(servers, reverse=bool(turn % 2))
            for name in names:
                server = servers[name]
                settle(servers.values())
                java = java_command(server.directory / "load", "consume", server.namesrv, "backlog", options.messages)
                table.add("Java push consumer", name, _run(java, server))
            for name in names:
                server = servers[name]
                settle(servers.values())
                raw = raw_command("consume", server.broker, "backlog", options.messages)
                table.add("pipelined pulls", name, _run(raw, server))
    table.show()


def _run(command: list[str], server: Server) -> Rate:
    if isinstance(server, ApacheServer):
        return run_window(command, server)
    before = server.metric("neve_cold_reads_total")
    rate = run_window(command, server)
    cold = server.metric("neve_cold_reads_total") - before
    print(f"  {'':28} neve: {f'the archive answered {cold:,.0f} pulls' if cold else 'the local log answered all'}")
    return rate


if __name__ == "__main__":
    main()
