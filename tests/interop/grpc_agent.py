"""A conversation with the official gRPC client for Python: one JSON object per line in, one out.

It is a separate program because the client has threads and writes logs below the user's home. It ends at end of input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import rocketmq
import rocketmq.v5.exception

_PUSH_S = 60
_STEP_S = 0.2


class Listener(rocketmq.MessageListener):  # type: ignore[misc]
    """Stores the messages that it receives; the first delivery of the message in `fails` is reported as a failure."""

    def __init__(self, prefix: str, wanted: int, fails: str) -> None:
        self._prefix, self._wanted, self._fails = prefix, wanted, fails
        self.got: list[dict[str, Any]] = []
        self.has_all = threading.Event()

    def consume(self, message: rocketmq.Message) -> rocketmq.ConsumeResult:
        body = message.body.decode()
        self.got.append({"body": body, "attempt": message.delivery_attempt})
        if body == self._fails and message.delivery_attempt == 1:
            return rocketmq.ConsumeResult.FAILURE
        ours = {row["body"] for row in self.got if row["body"].startswith(self._prefix)}
        came_again = any(row["body"] == self._fails and row["attempt"] > 1 for row in self.got)
        if len(ours) >= self._wanted and came_again:
            self.has_all.set()
        return rocketmq.ConsumeResult.SUCCESS


class Checker(rocketmq.TransactionChecker):  # type: ignore[misc]
    """Commits transactions that were left open, except those whose body asks for a rollback."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def check(self, message: rocketmq.Message) -> rocketmq.TransactionResolution:
        self.asked.append(message.body.decode())
        rolls_back = message.body.endswith(b"roll back")
        return rocketmq.TransactionResolution.ROLLBACK if rolls_back else rocketmq.TransactionResolution.COMMIT


class GrpcAgent:
    def __init__(self, endpoints: str) -> None:
        self._configuration = rocketmq.ClientConfiguration(endpoints, rocketmq.Credentials(), request_timeout=10)
        self._producers: dict[str, Any] = {}
        self._consumers: dict[str, Any] = {}
        self._received: list[tuple[Any, Any]] = []
        self._checker = Checker()

    def answer(self, request: dict[str, Any]) -> Any:
        verb: Callable[..., Any] = getattr(self, "do_" + request.pop("do"))
        return verb(**request)

    def do_send(self, topic: str, body: str, *, group: str = "", at_ms: int = 0, tag: str = "") -> dict[str, Any]:
        receipt = self._producer(topic).send(self._message(topic, body, group=group, at_ms=at_ms, tag=tag))
        return {"id": receipt.message_id, "offset": receipt.offset, "recall_handle": receipt.recall_handle}

    def do_transaction(self, topic: str, body: str, end: str) -> dict[str, Any]:
        producer = self._producer(topic, self._checker)
        transaction = producer.begin_transaction()
        receipt = producer.send(self._message(topic, body), transaction)
        if end:
            getattr(transaction, end)()
        return {"id": receipt.message_id}

    def do_asked(self) -> list[str]:
        """Return the transactions for which the producer received a check-back."""
        return self._checker.asked

    def do_recall(self, topic: str, handle: str) -> dict[str, Any]:
        return {"id": self._producer(topic).recall_message(topic, handle)}

    def do_receive(self, topic: str, group: str, count: int, invisible: int, within: float) -> list[dict[str, Any]]:
        """Return the received messages once there are `count`, or when the time is up."""
        consumer = self._consumer(topic, group)
        rows: list[dict[str, Any]] = []
        deadline = time.monotonic() + within
        while len(rows) < count and time.monotonic() < deadline:
            for message in _received(consumer, count - len(rows), invisible):
                row = {"body": message.body.decode(), "attempt": message.delivery_attempt, "id": message.message_id}
                rows.append({**row, "tag": message.tag, "number": len(self._received)})
                self._received.append((consumer, message))
        return rows

    def do_ack(self, number: int) -> None:
        consumer, message = self._received[number]
        consumer.ack(message)

    def do_hide(self, number: int, seconds: int) -> None:
        consumer, message = self._received[number]
        consumer.change_invisible_duration(message, seconds)

    def do_push(self, topic: str, group: str, prefix: str, count: int, fails: str) -> list[dict[str, Any]]:
        """Return a push consumer's messages once it has `count` with the prefix, including a redelivered one."""
        listener = Listener(prefix, count, fails)
        subscription = {topic: rocketmq.FilterExpression()}
        consumer = rocketmq.PushConsumer(self._configuration, group, listener, subscription)
        consumer.startup()
        listener.has_all.wait(_PUSH_S)
        consumer.shutdown()
        return listener.got

    def _message(self, topic: str, body: str, *, group: str = "", at_ms: int = 0, tag: str = "") -> Any:
        message = rocketmq.Message()
        message.topic, message.body = topic, body.encode()
        if group:
            message.message_group = group
        if at_ms:
            message.delivery_timestamp = at_ms // 1000
        if tag:
            message.tag = tag
        return message

    def _producer(self, topic: str, checker: Checker | None = None) -> Any:
        if topic not in self._producers:
            producer = rocketmq.Producer(self._configuration, (topic,), checker)
            producer.startup()
            self._producers[topic] = producer
        return self._producers[topic]

    def _consumer(self, topic: str, group: str) -> Any:
        if group not in self._consumers:
            consumer = rocketmq.SimpleConsumer(
                self._configuration, group, {topic: rocketmq.FilterExpression()}, await_duration=5
            )
            consumer.startup()
            self._consumers[group] = consumer
        return self._consumers[group]


def _received(consumer: Any, count: int, invisible: int) -> list[Any]:
    """Return received messages; none before the proxy has the consumer's settings, which arrive on another stream."""
    try:
        return consumer.receive(count, invisible) or []
    except rocketmq.v5.exception.InternalErrorException as error:
        if "settings" not in str(error):
            raise
        threading.Event().wait(_STEP_S)
        return []


def main() -> None:
    agent = GrpcAgent(sys.argv[1])
    for line in sys.stdin:
        try:
            answer = {"ok": agent.answer(json.loads(line))}
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the test's answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    os._exit(0)  # The client's threads do not end with it.


if __name__ == "__main__":
    main()
