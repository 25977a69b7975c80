"""Tests that errors subclass matching built-in errors and time limits must be positive."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from neve import BrokerError, ClientError, ConnectionFailed, ConnectionLost, NeveError, RequestTimeout, UnknownOutcome
from neve.client import AsyncClient, ClientOptions, Message, connect
from tests.kit.clock.waiting import until
from tests.kit.cluster.fake_cluster import sends, silent

REQUEST = Message("t", b"x", properties={"CLUSTER": "c", "CORRELATION_ID": "1", "REPLY_TO_CLIENT": "2"})
CALLS: dict[str, Callable[[AsyncClient], Awaitable[Any]]] = {
    "send": lambda client: client.send("t", b"x", timeout=0),
    "send_async": lambda client: client.send_async("t", b"x", timeout=0),
    "send_oneway": lambda client: client.send_oneway("t", b"x", timeout=0),
    "send_batch": lambda client: client.send_batch("t", [b"x"], timeout=0),
    "send_to_group": lambda client: client.send_to_group(REQUEST, "g", timeout=0),
    "request": lambda client: client.request("t", b"x", timeout=0),
    "reply": lambda client: client.reply(REQUEST, b"x", timeout=0),
    "recall": lambda client: client.recall("t", "", timeout=0),
    "pull": lambda client: client.pull("t", 0, 0, timeout=0),
    "create_topic": lambda client: client.admin.create_topic("t", timeout=0),
}


@pytest.mark.parametrize("name", CALLS)
async def test_timeout_of_zero_is_refused_before_any_request(fake_cluster: Any, name: str) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        with pytest.raises(ClientError, match="timeout must be more than 0 s, got 0"):
            await CALLS[name](client)
        assert not cluster.brokers[0].requests


@pytest.mark.parametrize(
    "name",
    ["timeout", "attempt_timeout", "connect_timeout", "heartbeat_interval", "rebalance_interval", "commit_interval"],
)
def test_option_of_zero_seconds_is_refused(name: str) -> None:
    changes: dict[str, Any] = {name: 0}
    with pytest.raises(ClientError, match=f"{name} must be more than 0 s, got 0"):
        replace(ClientOptions(), **changes)


async def test_missing_answer_is_a_timeout_error(fake_cluster: Any) -> None:
    options: dict[str, Any] = {"attempt_timeout": 0.05, "send_retries": 0}
    async with fake_cluster(silent) as cluster, connect(cluster.namesrv.address, **options) as client:
        with pytest.raises(TimeoutError) as caught:
            await client.send("t", b"x")
        assert isinstance(caught.value, RequestTimeout)
        assert isinstance(caught.value, UnknownOutcome)
        assert caught.value.errno is None


async def test_request_reports_the_timeout_of_its_send(fake_cluster: Any) -> None:
    """The time limit of the request is not over, so the error names the broker."""

    options: dict[str, Any] = {"attempt_timeout": 0.05, "send_retries": 0}
    async with fake_cluster(silent) as cluster, connect(cluster.namesrv.address, **options) as client:
        with pytest.raises(RequestTimeout, match="no answer from 127"):
            await client.request("t", b"x", timeout=60)


async def test_broken_connection_is_a_connection_error(fake_cluster: Any) -> None:
    async with fake_cluster(silent) as cluster, connect(cluster.namesrv.address, send_retries=0) as client:
        sending = client.send_async("t", b"x")
        await until(lambda: bool(sends(cluster.brokers[0])))
        await cluster.brokers[0].stop()
        with pytest.raises(ConnectionError) as caught:
            await sending
        assert isinstance(caught.value, ConnectionLost)


async def test_unreachable_name_server_is_a_connection_error() -> None:
    with pytest.raises(ConnectionError) as caught:
        async with connect("127.0.0.1:1"):
            pass
    assert isinstance(caught.value, ConnectionFailed)
    assert isinstance(caught.value, NeveError)


def test_refusal_is_neither_timeout_nor_connection_error() -> None:
    assert not issubclass(BrokerError, OSError)
    assert not issubclass(ClientError, OSError)
