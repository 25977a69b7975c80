"""Switch the master of a broker set, and read its messages."""

from __future__ import annotations

from broker.ha.controller_calls import ControllerCall
from neve.record.codec import iter_records
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from tests.kit.broker.in_process import send
from tests.kit.broker.set_in_process import BrokerMember, Set
from tests.kit.clock.waiting import until

TOPIC = "orders"


def bodies(member: BrokerMember, topic: str = TOPIC) -> list[bytes]:
    got = member.broker.store.reader.get(topic, 0, 0, 1000, 1 << 20)
    return [bytes(record.body) for buffer in got.buffers for record in iter_records(buffer)]


async def shows(member: BrokerMember, *expected: bytes) -> None:
    """Wait until the member's readers get exactly the expected bodies."""
    await until(lambda: bodies(member) == list(expected), f"it has {expected}")


async def put(member: BrokerMember, *sent: bytes, topic: str = TOPIC, properties: str = "") -> None:
    """Send messages once enough members are in sync."""
    await until(member.broker.membership.admission.may_append, "the set takes messages")  # type: ignore[union-attr]
    connection = await member.connect()
    try:
        for body in sent:
            await send(connection, topic, body, properties)
    finally:
        connection.close()


async def hand_to(brokers: Set, target: BrokerMember) -> None:
    """Make a member the master at once, as an operator does by the controller."""
    replicas = target.replicas
    ext = {"clusterName": "DefaultCluster", "brokerName": "broker-a", "designateElect": "true"}
    call = ControllerCall(Code.CONTROLLER_ELECT_MASTER, {**ext, "brokerId": str(replicas.member.broker_id)})
    answer = await replicas.requests.controllers.ask(call)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    await until(lambda: target.leads, "the designated one leads")
