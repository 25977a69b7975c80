"""Reading a backlog of 1 KiB messages from the start: neve beside Apache RocketMQ 5.3.3, default settings, in turn.

By a push consumer of the stock Java client, and by one connection with a pull of 32 messages under way for each queue.
Every run is a new group over the same backlog, which lies in the page cache on both sides.
"""

from __future__ import annotations

import subprocess

from bench.measure import SIZE, Table, arguments, java_command, raw_command, run_window, settle, side_by_side
from bench.raw_load import create


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
                table.add("Java push consumer", name, run_window(java, server))
            for name in names:
                server = servers[name]
                settle(servers.values())
                raw = raw_command("consume", server.broker, "backlog", options.messages)
                table.add("pipelined pulls", name, run_window(raw, server))
    table.show()


if __name__ == "__main__":
    main()
