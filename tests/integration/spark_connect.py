"""Spark Connect: sessions, and jobs that the server runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from neve.client import connect
from tests.client_conformance.conftest import create_topic


async def create(topic: str, namesrv: str) -> None:
    async with connect(namesrv) as client:
        await create_topic(client, topic, 2)


async def received(topic: str, namesrv: str, count: int) -> list[tuple[str | None, str]]:
    found: list[tuple[str | None, str]] = []
    async with connect(namesrv) as client, client.consumer("reader", {topic: "*"}, start="earliest") as consumer:
        while (message := await consumer.receive(60.0 if len(found) < count else 2.0)) is not None:
            found.append((message.properties.get("TAGS"), message.body.decode("latin-1")))
            await message.ack()
    return found


def through_connect(script: str, home: Path, *arguments: str, timeout: float = 240) -> Any:
    """Run a program that starts a Spark Connect server, and return the JSON that it prints."""
    path = home / "connected.py"
    path.write_text(script)
    places = {"PYSPARK_PYTHON": sys.executable, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **places},
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.rpartition("found ")[2])
