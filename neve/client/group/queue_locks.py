"""Locks of queues at their brokers: in a group that consumes in order, at most one member reads a queue.

A broker expires a lock that is not renewed for 60 s. The client relies on it for 30 s, and renews it every 20 s.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable

from neve.client.model import MessageQueue
from neve.client.net.answers import parse_body
from neve.client.net.session import Session
from neve.errors import NeveError
from neve.remoting.body import dumps
from neve.remoting.codes import RequestCode

log = logging.getLogger(__name__)

LOCK_VALID_S = 30.0
LOCK_RENEWAL_S = 20.0


class QueueLocks:
    """The locks of one member of a group."""

    def __init__(self, session: Session, group: str) -> None:
        self._session = session
        self._group = group

    async def lock(self, queues: Iterable[MessageQueue]) -> tuple[set[MessageQueue], set[MessageQueue]]:
        """Lock queues, or renew their locks; return the locked queues, and those whose broker did not answer."""
        granted: set[MessageQueue] = set()
        unknown: set[MessageQueue] = set()
        for name, wanted in _by_broker(queues).items():
            try:
                answer = parse_body(
                    await self._session.requests.ask(
                        await self._address(wanted[0]), RequestCode.LOCK_BATCH_MQ, {}, body=self._body(wanted)
                    )
                )
            except NeveError as error:
                log.warning("queues not locked: broker=%s group=%s cause=%s", name, self._group, error)
                self._session.routes.forget(wanted[0].topic)
                unknown.update(wanted)
                continue
            for item in answer.get("lockOKMQSet") or ():
                granted.add(MessageQueue(str(item["topic"]), str(item["brokerName"]), int(item["queueId"])))
        return granted, unknown

    async def unlock(self, queues: Iterable[MessageQueue]) -> None:
        """Unlock queues. If a broker does not answer, its locks expire after 60 s."""
        for name, wanted in _by_broker(queues).items():
            try:
                address = await self._address(wanted[0])
                await self._session.requests.ask(
                    address, RequestCode.UNLOCK_BATCH_MQ, {}, body=self._body(wanted), timeout=1.0
                )
            except NeveError as error:
                log.info("queues not unlocked: broker=%s group=%s cause=%s", name, self._group, error)

    async def _address(self, queue: MessageQueue) -> str:
        return await self._session.routes.master(queue)

    def _body(self, queues: list[MessageQueue]) -> bytes:
        named = [{"topic": q.topic, "brokerName": q.broker_name, "queueId": q.queue_id} for q in queues]
        return dumps(
            {
                "consumerGroup": self._group,
                "clientId": self._session.client_id,
                "onlyThisBroker": False,
                "mqSet": named,
            }
        )


def _by_broker(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    groups: dict[str, list[MessageQueue]] = defaultdict(list)
    for queue in sorted(queues):
        groups[queue.broker_name].append(queue)
    return groups
