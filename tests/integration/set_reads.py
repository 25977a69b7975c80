"""Read the messages of a broker set."""

from __future__ import annotations

from bench.wire import Client
from tests.kit.server.broker_set import TOPIC
from tests.kit.server.neve import Serving


def bodies(member: Serving) -> list[bytes]:
    """Return the bodies of all messages visible to readers."""
    with Client(member.broker) as client:
        return [bytes(record.body) for record in client.read(TOPIC, 0, *client.bounds(TOPIC, 0))]
