"""POP_CK, the receipt handle with which a consumer acknowledges a popped message.

POP_CK: checkpoint offset ␣ pop time ␣ invisible time ␣ revive queue ␣ r ␣ broker name ␣ queue [␣ message offset]

RocketMQ's proxy appends the message's physical offset to the POP_CK of its clients. Fields after
the eighth are ignored.
"""

from dataclasses import dataclass

from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode

REVIVE_QUEUE = 0
# The revive queue of messages that were popped in order.
ORDER_QUEUE = 999


@dataclass(frozen=True, slots=True)
class ExtraInfo:
    """Fields of a POP_CK (RocketMQ's ExtraInfoUtil): times in ms, offsets in the topic that `retry` denotes."""

    checkpoint_offset: int
    pop_time: int
    invisible_time: int
    revive_queue: int
    retry: str
    broker: str
    queue_id: int
    offset: int = -1

    @classmethod
    def parse(cls, text: str) -> "ExtraInfo":
        """Parse the first seven or eight fields. Raises BrokerError for a malformed text."""
        parts = text.split(" ", 8)[:8]
        if len(parts) < 7:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"extraInfo has {len(parts)} fields, not 7 or 8")
        try:
            start, popped, invisible, revive = (int(part) for part in parts[:4])
            return cls(start, popped, invisible, revive, parts[4], parts[5], *(int(part) for part in parts[6:]))
        except ValueError as error:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"extraInfo: {error}") from error

    def to_text(self) -> str:
        text = (
            f"{self.checkpoint_offset} {self.pop_time} {self.invisible_time} {self.revive_queue} "
            f"{self.retry} {self.broker} {self.queue_id}"
        )
        return text if self.offset < 0 else f"{text} {self.offset}"
