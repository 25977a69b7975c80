"""The strings of pop: POP_CK, the two tables of an answer, and the name of a group's pop-retry topic.

POP_CK: checkpoint offset ␣ pop time ␣ invisible time ␣ revive queue ␣ r ␣ broker name ␣ queue [␣ message offset]

A proxy appends the message's place in the log to the POP_CK that its clients hand back: what follows is not read.
"""

from dataclasses import dataclass

from broker.validators import RETRY_PREFIX
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode

NORMAL, RETRY_V1, RETRY_V2 = "0", "1", "2"
REVIVE_QUEUE = 0
# The revive queue of messages that were popped in order.
ORDER_QUEUE = 999


@dataclass(frozen=True, slots=True)
class ExtraInfo:
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
        """The first seven or eight fields; fewer are the request's fault."""
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


def pop_retry_topic(topic: str, group: str) -> str:
    return topic if topic.startswith(RETRY_PREFIX) else f"{RETRY_PREFIX}{group}_{topic}"


def real_topic(topic: str, group: str, retry: str) -> str:
    """The topic that an acknowledgement in its short form means."""
    if retry == NORMAL:
        return topic
    return f"{RETRY_PREFIX}{group}{'+' if retry == RETRY_V2 else '_'}{topic}"
