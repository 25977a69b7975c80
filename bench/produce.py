"""Sends of 1 KiB: neve and Apache RocketMQ 5.3.3 alternate in one run, both with default settings.

There are two generators: threads of the stock Java client (an application's view), and frames pipelined over one
connection (the broker's capacity). A window begins when both brokers are idle, so that none pays for the archiving of
the previous one; bench/archive.py measures the cost of a round per MB. Servers and generator share the machine:
messages per CPU-second of the broker is the figure that does not depend on the number of cores.
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
            # The order alternates, so that neither server always has the warm machine.
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
