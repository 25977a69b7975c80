"""Transactional messages: delivered once committed, never after a rollback, and otherwise as the check decides."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from neve.client import AsyncClient, LocalTransactionState, Message, connect, sync
from neve.errors import ClientError

COMMIT, ROLLBACK, UNKNOWN = LocalTransactionState.COMMIT, LocalTransactionState.ROLLBACK, LocalTransactionState.UNKNOWN


def never(message: Message) -> LocalTransactionState:
    raise AssertionError(f"{message.msg_id} was asked about")


async def delivered(client: AsyncClient, topic: str, count: int) -> list[Message]:
    """Return the first `count` messages of queue 0 after checking that it holds exactly these."""
    messages: list[Message] = []
    while len(messages) < count:
        messages += (await client.pull(topic, 0, len(messages), wait=15, timeout=30)).messages
    assert await client.max_offset(topic, 0) == count
    return messages


def test_commit_delivers_the_message_and_rollback_does_not(run: Callable[..., None], unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        async with client.transaction_producer(unique, check=never) as producer:
            async with producer.transaction(topic, b"rolled back") as transaction:
                await transaction.rollback()
            async with producer.transaction(topic, b"committed", tags="T", keys=["k"]) as transaction:
                assert await client.max_offset(topic, 0) == 0  # Consumers do not receive a half message.
            assert transaction.state is COMMIT
            result = await producer.send(topic, b"z" * 5000, execute=lambda message: COMMIT)
            assert result.state is COMMIT
            with pytest.raises(ClientError):
                await transaction.rollback()
            first, second = await delivered(client, topic, 2)
            assert (first.body, first.tags, first.keys, first.msg_id) == (b"committed", "T", ("k",), transaction.id)
            assert second.body == b"z" * 5000

    run(work, queues=1)


def test_open_transaction_ends_by_check_back(run: Callable[..., None], unique: str) -> None:
    """The broker checks back until it gets an answer: the first check fails, the next is undecided, a third decides."""

    async def work(client: AsyncClient, topic: str) -> None:
        asked: dict[bytes, list[str]] = {}

        async def check(message: Message) -> LocalTransactionState:
            times = asked.setdefault(message.body, [])
            times.append(message.msg_id)
            if message.body == b"dropped":
                return ROLLBACK
            if len(times) == 1:
                raise ValueError("the database is away")
            return UNKNOWN if len(times) == 2 else COMMIT

        async with client.transaction_producer(unique, check=check) as producer:
            with pytest.raises(RuntimeError):
                async with producer.transaction(topic, b"dropped"):
                    raise RuntimeError("my own work failed")
            opened = await producer.send(topic, b"kept", execute=lambda message: UNKNOWN, properties={"colour": "red"})
            (message,) = await delivered(client, topic, 1)
            assert (message.body, message.properties["colour"]) == (b"kept", "red")
            assert len(asked[b"kept"]) >= 3
            assert set(asked[b"kept"]) == {opened.sent.msg_id}
            assert asked[b"dropped"]

    run(work, queues=1)


def test_other_group_member_answers_the_check_of_a_lost_producer(
    run: Callable[..., None], unique: str, server: Any
) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        async with connect(server.namesrv) as gone:
            producer = gone.transaction_producer(unique, check=lambda message: UNKNOWN)
            await producer.start()
            transaction = await producer.begin(topic, b"orphan")
        async with client.transaction_producer(unique, check=lambda message: COMMIT):
            (message,) = await delivered(client, topic, 1)
            assert message.msg_id == transaction.id

    run(work, queues=1)


def test_producer_group_has_one_producer_in_a_client_and_must_be_started(run: Callable[..., None], unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        with pytest.raises(ClientError):
            await client.transaction_producer(unique, check=never).begin(topic, b"x")
        async with client.transaction_producer(unique, check=never):
            with pytest.raises(ClientError):
                await client.transaction_producer(unique, check=never).start()
        async with client.transaction_producer(unique, check=never):
            pass  # The group may be joined again.

    run(work, queues=1)


def test_synchronous_producer_runs_callbacks_outside_the_event_loop(server: Any, topic: str, unique: str) -> None:
    threads: dict[str, str] = {}

    def check(message: Message) -> LocalTransactionState:
        threads["check"] = threading.current_thread().name
        return COMMIT

    def execute(message: Message) -> LocalTransactionState:
        threads["execute"] = threading.current_thread().name
        return UNKNOWN

    with sync.connect(server.namesrv) as client, client.transaction_producer(unique, check=check) as producer:
        with producer.transaction(topic, b"in a block"):
            pass
        with producer.transaction(topic, b"never") as transaction:
            transaction.rollback()
        producer.send(topic, b"checked", execute=execute)
        with client.consumer(f"G-{unique}", topic, start="earliest") as consumer:
            bodies = {message.body for message in (consumer.receive(20), consumer.receive(20)) if message}
        assert bodies == {b"in a block", b"checked"}
    assert threads["execute"] == threading.current_thread().name
    assert threads["check"] not in {threading.current_thread().name, "neve-client"}
