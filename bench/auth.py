"""The cost of authentication: the same sends of 1 KiB to two brokers on one machine, one of which requires signatures.

Otherwise both have default settings (authentication and authorization, and a user whose policy allows the topic, like
an application's), and do not archive meanwhile. Frames are built and signed beforehand and pipelined over one
connection; windows alternate. The figure is messages per CPU-second of the broker, and the cost is the ratio of the CPU
times of a signed and an unsigned send: the median of pairs of consecutive windows.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec

from bench.measure import SIZE, Rate, Table, raw_command, run_window, settle, spread
from bench.raw_load import create
from bench.wire import Client, Signer
from tests.kit.server.neve import NeveServer

TOPIC = "bench"
CREATE_USER, CREATE_ACL = 3001, 3006
ADMIN, USER = Signer("admin", "the administrator's secret"), Signer("bench", "the application's secret")
_CREDENTIALS = f'{{"username":"{ADMIN.name}","password":"{ADMIN.secret}"}}'
_QUIET = {"archivePeriod": "1h"}
SETTINGS = {
    "authenticationEnabled": "true",
    "authorizationEnabled": "true",
    "initAuthenticationUser": _CREDENTIALS,
    "innerClientAuthenticationCredentials": _CREDENTIALS,
}


def add_user(broker: str) -> None:
    """Add an application's user, which may send to one topic."""
    subject = f"User:{USER.name}"
    rules = {"policies": [{"policyType": "Custom", "entries": [{"resource": f"Topic:{TOPIC}", "actions": ["Pub"]}]}]}
    with Client(broker, signer=ADMIN) as client:
        client.ask(CREATE_USER, {"username": USER.name}, msgspec.json.encode({"password": USER.secret}))
        client.ask(CREATE_ACL, {"subject": subject}, msgspec.json.encode(rules))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of the measured window")
    parser.add_argument("--warm", type=float, default=1.0, help="seconds before it")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[16, 64])
    options = parser.parse_args()
    table = Table(f"Produce, {SIZE} B, with and without authentication", ("signed", "open"))
    costs: dict[int, list[float]] = {in_flight: [] for in_flight in options.in_flight}
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neve-bench-")))
        servers = {
            "open": stack.enter_context(NeveServer(root / "open", settings=_QUIET)),
            "signed": stack.enter_context(NeveServer(root / "signed", settings=_QUIET | SETTINGS)),
        }
        create(servers["open"].broker, TOPIC)
        create(servers["signed"].broker, TOPIC, ADMIN)
        add_user(servers["signed"].broker)
        for turn in range(options.repeat):
            for in_flight in options.in_flight:
                rates: dict[str, Rate] = {}
                for name in sorted(servers, reverse=bool(turn % 2)):
                    settle(servers.values())
                    window = (SIZE, in_flight, options.warm, options.seconds)
                    user = (USER.name, USER.secret) if name == "signed" else ()
                    command = raw_command("produce", servers[name].broker, TOPIC, *window, *user)
                    rates[name] = run_window(command, servers[name])
                    table.add(f"pipelined, {in_flight} in flight", name, rates[name])
                costs[in_flight].append(rates["open"].per_cpu_second / rates["signed"].per_cpu_second)
    table.show()
    for in_flight, found in costs.items():
        print(f"a signed send, {in_flight} in flight: {spread(found, 2)} times the CPU")


if __name__ == "__main__":
    main()
