"""Send a day of flights from New York, and its weather, to a running neve and archive it: the data of the notebooks.

neve up --data /tmp/neve --store dir:/tmp/neve-archive & python -m examples.day [--namesrv 127.0.0.1:9876] [--admin
HOST:PORT] [--date 2013-01-01]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterable, Mapping

import pandas as pd

from neve.client import Message, connect
from neve.demo.flights import FLIGHTS, QUEUES, WEATHER, chunks, flight_messages, load, weather_messages
from neve.demo.servers import neve

BATCH = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namesrv", default="127.0.0.1:9876")
    parser.add_argument("--admin", help="admin port of the broker")
    parser.add_argument("--date", default="2013-01-01")
    options = parser.parse_args()
    flights, weather = day(options.date)
    if flights.empty:
        raise SystemExit(f"no flight on {options.date}: the data are of 2013")
    for topic, queues in QUEUES.items():
        neve("topic", "create", topic, "--queues", str(queues), "--namesrv", options.namesrv)
    sent = {FLIGHTS: flight_messages(flights), WEATHER: weather_messages(weather)}
    asyncio.run(send(options.namesrv, sent))
    where = ("--admin", options.admin) if options.admin else ("--namesrv", options.namesrv)
    neve("archive", "offload", "--roll", *where)
    print(f"{len(flights)} flights and {len(weather)} hours of weather of {options.date} are archived")
    return 0


def day(date: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return flights and weather by the hour for which a flight was scheduled."""
    flights, weather = (frame[frame.time_hour.str.startswith(date)] for frame in load())
    return flights, weather


async def send(namesrv: str, messages: Mapping[str, Iterable[Message]]) -> None:
    """Send batches to each queue in turn."""
    async with connect(namesrv, timeout=120.0, attempt_timeout=60.0) as client:
        for topic, coming in messages.items():
            for number, batch in enumerate(chunks(iter(coming), BATCH)):
                result = await client.send_batch(topic, batch, queue=number % QUEUES[topic])
                assert result.status == "SEND_OK", result.status


if __name__ == "__main__":
    sys.exit(main())
