"""Sends of 1 KiB: neve beside Apache RocketMQ 5.3.3, both with default settings, in one run, in turn.

Two generators: threads of the stock Java client (what an application sees), and frames pipelined over one connection
(what the broker can do). A window begins when both brokers are idle, so none pays for what the one before left to
archive; what a round costs for each MB, bench/archive.py measures. Servers and generator share the machine: messages
per CPU-second of the broker is the figure that does not depend on how many cores there are.
"""

from __future__ import annotations

from bench.measure import SIZE, Table, arguments, java_command, raw_command, run_window, settle, side_by_side
from bench.raw_load import create

IN_FLIGHT = (1, 16, 64)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of the measured window")
    parser.add_argument("--warm", type=float, default=4.0, help="seconds before it")
    parser.add_argument("--in-flight", type=int, nargs="+", default=list(IN_FLIGHT))
    options = parser.parse_args()
    table = Table(f"Produce, {SIZE} B")
    with side_by_side(options) as servers:
        for server in servers.values():
            create(server.broker, "bench")
        for turn in range(options.repeat):
            # The order changes from turn to turn, so that neither is always the one on the warm machine.
            names = sorted(servers, reverse=bool(turn % 2))
            for in_flight in options.in_flight:
                window = (SIZE, in_flight, options.warm, options.seconds)
                for name in names:
                    server = servers[name]
                    settle(servers.values())
                    java = java_command(server.directory / "load", "produce", server.namesrv, "bench", *window)
                    table.add(f"Java client, {in_flight} in flight", name, run_window(java, server))
                for name in names:
                    server = servers[name]
                    settle(servers.values())
                    raw = raw_command("produce", server.broker, "bench", *window)
                    table.add(f"pipelined, {in_flight} in flight", name, run_window(raw, server))
    table.show()


if __name__ == "__main__":
    main()
