"""A pop group member, over the wire of a broker in the test's own process whose clock the test advances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from broker.broker_controller import BrokerController
from infra.net.remoting_server import Connection
from neve.record.codec import iter_records
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from tests.kit.broker.in_process import ask


class Taken(NamedTuple):
    """One popped message with its receipt."""

    body: bytes
    topic: str
    queue_id: int
    offset: int
    receipt: str


@dataclass
class PopMember:
    broker: BrokerController
    connection: Connection
    topic: str = "t"
    group: str = "g"
    order: bool = False

    async def ask_pop(
        self, count: int = 32, *, queue: int = 0, invisible: int = 60_000, poll: int = 0, attempt: str = ""
    ) -> RemotingCommand:
        more = {"attemptId": attempt} if attempt else {}
        return await ask(
            self.connection, Code.POP_MESSAGE, consumerGroup=self.group, topic=self.topic, queueId=queue,
            maxMsgNums=count, invisibleTime=invisible, pollTime=poll, bornTime=0, initMode=0,
            order=str(self.order).lower(), **more,
        )  # fmt: skip

    async def pop(
        self, count: int = 32, *, queue: int = 0, invisible: int = 60_000, poll: int = 0, attempt: str = ""
    ) -> list[Taken]:
        answer = await self.ask_pop(count, queue=queue, invisible=invisible, poll=poll, attempt=attempt)
        assert answer.code in {ResponseCode.SUCCESS, ResponseCode.POLLING_TIMEOUT}, answer.remark
        return [] if answer.code else self.taken(answer)

    def taken(self, answer: RemotingCommand) -> list[Taken]:
        ext = answer.ext
        starts = {
            (retry, int(queue)): start
            for retry, queue, start in (part.split(" ") for part in ext["startOffsetInfo"].split(";"))
        }
        found = []
        for record in iter_records(answer.body):
            text = record.properties.get("POP_CK")
            if text is None:
                start = starts["0", record.queue_id]
                times = f"{ext['popTime']} {ext['invisibleTime']} {ext['reviveQid']}"
                text = f"{start} {times} 0 broker-a {record.queue_id} {record.queue_offset}"
            found.append(Taken(record.body, record.topic, record.queue_id, record.queue_offset, text))
        return found

    async def ack(self, *taken: Taken) -> None:
        for one in taken:
            answer = await ask(self.connection, Code.ACK_MESSAGE, **self._place(one))
            assert answer.code == ResponseCode.SUCCESS, answer.remark

    async def hide(self, taken: Taken, milliseconds: int) -> Taken:
        """Change the invisible time; return the message with its new receipt."""
        answer = await ask(
            self.connection, Code.CHANGE_MESSAGE_INVISIBLETIME, **self._place(taken), invisibleTime=milliseconds
        )
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        parts = taken.receipt.split(" ")
        parts[1:4] = answer.ext["popTime"], answer.ext["invisibleTime"], answer.ext["reviveQid"]
        return taken._replace(receipt=" ".join(parts))

    def _place(self, taken: Taken) -> dict[str, object]:
        parts = taken.receipt.split(" ")
        return {
            "consumerGroup": self.group,
            "topic": {"0": "{}", "1": "%RETRY%{1}_{0}", "2": "%RETRY%{1}+{0}"}[parts[4]].format(self.topic, self.group),
            "queueId": parts[6],
            "offset": parts[7],
            "extraInfo": taken.receipt,
        }

    async def ask_notification(self, *, queue: int = 0, poll: int = 0, attempt: str = "") -> RemotingCommand:
        more = {"attemptId": attempt} if attempt else {}
        return await ask(
            self.connection, Code.NOTIFICATION, consumerGroup=self.group, topic=self.topic, queueId=queue,
            pollTime=poll, bornTime=0, order=str(self.order).lower(), **more,
        )  # fmt: skip

    async def is_request_in_flight(self, *, queue: int = 0, poll: int = 0, attempt: str = "") -> bool:
        """Return whether a notification reports a message for a pop."""
        answer = await self.ask_notification(queue=queue, poll=poll, attempt=attempt)
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        return answer.ext["hasMsg"] == "true"

    async def reset(self, offset: int, queue: int = 0) -> None:
        """Reset the group like an administrator."""
        answer = await ask(
            self.connection, Code.INVOKE_BROKER_TO_RESET_OFFSET, topic=self.topic, group=self.group, timestamp=-1,
            isForce="true", queueId=queue, offset=offset,
        )  # fmt: skip
        assert answer.code == ResponseCode.SUCCESS, answer.remark

    async def offset(self, queue: int = 0) -> int:
        answer = await ask(
            self.connection, Code.QUERY_CONSUMER_OFFSET, consumerGroup=self.group, topic=self.topic, queueId=queue
        )
        return int(answer.ext["offset"])

    async def until_in_line(self, number: int = 1) -> None:
        """Wait until this many pops are pending at the broker; each request lets its event loop run."""
        while self.broker.polling.count < number:
            await ask(self.connection, Code.GET_BROKER_HA_STATUS)


def offsets(taken: list[Taken]) -> list[int]:
    return [one.offset for one in taken]
