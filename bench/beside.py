"""How long sends at a steady rate wait beside a producer that saturates the broker from one connection.

Windows alone and beside take turns. Printed at the end, as medians: the p99 of the steady sender alone and beside the
saturating producer, and the rate of the producer alone and beside the sender.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.measure import SIZE, raw_command, settle
from bench.raw_load import create
from tests.servers.neve import NeveServer

STEADY, BULK = "steady", "bulk"
WARM_S = 1.0


def steady(broker: str, rate: float, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.open_load", "send", broker, STEADY, str(SIZE), str(rate), str(WARM_S)]
    process = subprocess.Popen([*command, str(seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "READY\n"
    return process


def p99_of(process: subprocess.Popen[str]) -> float:
    """Milliseconds."""
    out, _ = process.communicate("\n", timeout=120)
    found = json.loads(out)
    assert not found["failed"], found
    return float(found["p99"]) / 1000


def bulk(broker: str, in_flight: int, seconds: float) -> subprocess.Popen[str]:
    command = raw_command("produce", broker, BULK, SIZE, in_flight, WARM_S, seconds)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def rate_of(process: subprocess.Popen[str]) -> float:
    """Messages a second between the marks."""
    out, _ = process.communicate(timeout=120)
    marks = [line.split() for line in out.splitlines() if line.startswith("MARK")]
    (_, begun, before), (_, ended, after) = marks
    return (int(after) - int(before)) / (int(ended) - int(begun)) * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1_000, help="sends a second of the steady sender")
    parser.add_argument("--in-flight", type=int, default=64, help="of the saturating producer")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a window")
    options = parser.parse_args()
    alone, beside, rates, rates_beside = list[float](), list[float](), list[float](), list[float]()
    with (
        tempfile.TemporaryDirectory(prefix="neve-bench-") as root,
        NeveServer(Path(root) / "neve", settings={"archivePeriod": "1d"}) as server,
    ):
        for topic in (STEADY, BULK):
            create(server.broker, topic)
        for _ in range(options.repeat):
            settle([server])
            alone.append(p99_of(steady(server.broker, options.rate, options.seconds)))
            settle([server])
            rates.append(rate_of(bulk(server.broker, options.in_flight, options.seconds)))
            settle([server])
            sender = steady(server.broker, options.rate, options.seconds)
            producer = bulk(server.broker, options.in_flight, options.seconds + WARM_S)
            beside.append(p99_of(sender))
            rates_beside.append(rate_of(producer))
    quiet, busy = statistics.median(alone), statistics.median(beside)
    print(f"p99 of {options.rate:,.0f} sends a second: alone {quiet:.2f} ms, beside {busy:.2f} ms, {busy / quiet:.1f}×")
    own, shared = statistics.median(rates), statistics.median(rates_beside)
    print(f"saturating producer: alone {own:,.0f}/s, beside {shared:,.0f}/s, {shared / own:.1%}")


if __name__ == "__main__":
    main()
