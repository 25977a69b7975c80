"""Ids and properties that the broker adds to messages of clients."""

from __future__ import annotations

from broker.intake.receipts import REGION, host_in_msg_id
from neve.record.ids import UniqueIdGenerator


class MessageStamp:
    """The broker's part of a message: its id, its unique id if the client set none, and its last properties."""

    def __init__(self, cluster: str, address: tuple[str, int], unique_ids: UniqueIdGenerator) -> None:
        #: Prefix of the ids of all messages.
        self.host = host_in_msg_id(address)
        #: The broker's own properties, encoded as text.
        self.text = f"MSG_REGION\x01{REGION}\x02TRACE_ON\x01true\x02CLUSTER\x01{cluster}\x02"
        #: Returns a unique id for the time in ms.
        self.next_unique_id = unique_ids.next

    def stamped(self, text: str) -> bytes:
        """Return the properties for the record: the client's, then the broker's own."""
        if text and text[-1] != "\x02":  # same as `ended`, inlined because each plain send calls this
            text += "\x02"
        return (text + self.text).encode("utf-8", "surrogatepass")
