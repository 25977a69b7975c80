"""Certificates and signed requests for servers with security."""

import asyncio
import ssl
import subprocess
from pathlib import Path
from typing import Any

from neve.client import connect

ROOT = '{"username":"root","password":"root-secret"}'


def make_certificate(directory: Path, name: str) -> tuple[Path, Path]:
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


async def round_trip(namesrv: str, topic: str, **options: Any) -> bytes:
    async with connect(namesrv, **options) as client:
        await client.admin.create_topic(topic, queues=1)
        sent = await client.send(topic, b"over the wire")
        async with client.consumer("readers", {topic: "*"}) as consumer:
            async with asyncio.timeout(20):
                async for message in consumer:
                    assert message.queue_offset == sent.queue_offset
                    return message.body
    raise AssertionError("nothing arrived")
