"""A member of a consumer group: its data in heartbeats, the other members, and its share of the queues."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neve.client.group.allocation import Allocation, chosen
from neve.client.group.pull import Subscription
from neve.client.model import MessageQueue
from neve.client.net.answers import parse_body
from neve.client.net.membership import RequestHandler
from neve.client.net.session import Session
from neve.client.times import Start, start_position
from neve.errors import BrokerError, ClientError, NeveError
from neve.record.properties import tags_code
from neve.remoting.body import dumps
from neve.remoting.codes import RequestCode

log = logging.getLogger(__name__)

_FROM_WHERE = {"earliest": "CONSUME_FROM_FIRST_OFFSET", "latest": "CONSUME_FROM_LAST_OFFSET"}


@dataclass(frozen=True, slots=True)
class GroupProfile:
    """How a member describes itself. `start` is where a group without committed offsets begins."""

    group: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    start: Start = "latest"

    def __post_init__(self) -> None:
        if not self.group:
            raise ClientError("a consumer needs a group")
        start_position(self.start)


class GroupMember:
    """The membership of one client in one group."""

    def __init__(self, session: Session, profile: GroupProfile, topics: Mapping[str, Subscription]) -> None:
        self._session = session
        self.profile = profile
        self.group = profile.group
        self.topics = dict(topics)
        self._version = session.options.now_ms()
        self._is_in = False

    async def join(self, handler: RequestHandler) -> None:
        """Register the member at the brokers; `handler` answers their requests.

        Raises:
            ClientError: this client is already in the group.
            BrokerError: a broker rejected a filter expression.
        """
        self._session.membership.add_consumer(self.group, self.describe, handler)
        self._is_in = True
        try:
            await self.refresh_routes()
            await self._check_filters()
        except BaseException:
            self._forget()
            raise
        await self._session.membership.heartbeat()

    async def leave(self) -> None:
        """Unregister the member at the brokers, so that the other members take over its queues."""
        if self._is_in:
            self._forget()
            await self._session.membership.unregister({"consumerGroup": self.group})

    def change_topics(self, topics: Mapping[str, Subscription]) -> None:
        """Replace the subscriptions, from the next heartbeat on."""
        self.topics = dict(topics)
        self._version = max(self._session.options.now_ms(), self._version + 1)

    async def refresh_routes(self) -> None:
        """Read the routes of all subscribed topics."""
        for topic in self.topics:
            try:
                await self._session.routes.get(topic, fresh=True)
            except BrokerError as error:  # the first heartbeat creates the retry topic
                log.info("topic has no route yet: topic=%s cause=%s", topic, error)

    async def members(self, topic: str) -> list[str]:
        """Return the client ids of the group's members, as a broker of the topic knows them."""
        route = await self._session.routes.get(topic)
        problem: NeveError = ClientError(f"{topic} has no broker")
        for name in sorted(route.brokers):
            address = route.address(name)
            if address is None:
                continue
            try:
                ext = {"consumerGroup": self.group}
                answer = await self._session.requests.ask(address, RequestCode.GET_CONSUMER_LIST_BY_GROUP, ext)
            except NeveError as error:
                problem = error
                continue
            members = [str(member) for member in parse_body(answer).get("consumerIdList") or ()]
            if self._session.client_id not in members:  # the broker does not know this member, or not yet
                await self._session.membership.heartbeat()
                members.append(self._session.client_id)
            return members
        if isinstance(problem, BrokerError):  # the broker knows no member of the group
            await self._session.membership.heartbeat()
        raise problem

    # ---- data in heartbeats

    def describe(self) -> dict[str, Any]:
        """Return the ConsumerData of a heartbeat."""
        return {
            "consumeFromWhere": _FROM_WHERE.get(str(self.profile.start), "CONSUME_FROM_TIMESTAMP"),
            "consumeType": self.profile.consume_type,
            "groupName": self.group,
            "messageModel": self.profile.message_model,
            "subscriptionDataSet": self.subscriptions(),
            "unitMode": False,
        }

    def subscriptions(self) -> list[dict[str, Any]]:
        """Return the SubscriptionData of each topic."""
        return [self._subscription(topic, what) for topic, what in self.topics.items()]

    def _subscription(self, topic: str, what: Subscription) -> dict[str, Any]:
        tags = sorted(what.tags)
        return {
            "classFilterMode": False,
            "codeSet": [tags_code(tag) for tag in tags],
            "expressionType": what.kind,
            "subString": what.expression,
            "subVersion": self._version,
            "tagsSet": tags,
            "topic": topic,
        }

    async def _check_filters(self) -> None:
        """Have every broker of a topic with an SQL92 filter check the filter, before the member joins."""
        for topic, what in self.topics.items():
            if what.kind == "TAG":
                continue
            data = self._subscription(topic, what)
            body = dumps({"clientId": self._session.client_id, "group": self.group, "subscriptionData": data})
            route = await self._session.routes.get(topic)
            for name in route.brokers:
                if address := route.address(name):
                    await self._session.requests.ask(address, RequestCode.CHECK_CLIENT_CONFIG, {}, body=body)

    def _forget(self) -> None:
        self._is_in = False
        self._session.membership.remove_consumer(self.group)


class ClusterShare:
    """The share of a member in clustering mode: the members divide the queues by an allocation."""

    def __init__(self, session: Session, member: GroupMember, allocation: str | Allocation) -> None:
        self._session = session
        self._member = member
        self._allocate = chosen(allocation)

    async def __call__(self, topic: str) -> set[MessageQueue]:
        route = await self._session.routes.get(topic)
        return set(self._allocate(self._session.client_id, await self._member.members(topic), route.read_queues))


class BroadcastShare:
    """The share of a member in broadcasting mode: all queues."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def __call__(self, topic: str) -> set[MessageQueue]:
        return set((await self._session.routes.get(topic)).read_queues)
