"""Send receipts, rendered from a template because their headers differ only in a few fields."""

import base64
import functools
import json
import struct
from collections.abc import Iterable

from broker.intake.message import Stored
from broker.store.appender import AppendResult
from neve.record.ids import offset_msg_id
from neve.remoting.codes import VERSION
from neve.remoting.command import RemotingCommand

REGION = "DefaultRegion"

# Formatting bytes takes a quarter of the time of formatting a str and encoding it.
_HEAD = (
    '{"code":%d,"extFields":{"MSG_REGION":"' + REGION + '","TRACE_ON":"true","msgId":"%b","queueId":"%d",'
    '"queueOffset":"%d"%b},"flag":1,"language":"PYTHON","opaque":%d,"serializeTypeCurrentRPC":"JSON","version":'
    + str(int(VERSION))
    + "}"
).encode()
_LENGTHS = struct.Struct(">ii")


@functools.lru_cache(maxsize=8)
def host_in_msg_id(address: tuple[str, int]) -> str:
    """Return the common prefix of this broker's message ids.

    Cached, because parsing the address for each message took longer than storing the message.
    """
    return offset_msg_id(address, 0)[:-16]


# Fields of a plain send: queue id, unique id (ASCII letters and digits), opaque, whether it is answered (not one-way),
# whether it waits for disk and replicas.
PlainSend = tuple[int, str, int, bool, bool]


class ReceiptTemplate:
    """Renderer of this broker's answers to plain sends."""

    def __init__(self, address: tuple[str, int]) -> None:
        host = host_in_msg_id(address).encode()
        self._head = _HEAD.replace(b"%b", host + b"%016X", 1).replace(b"%b", b',"transactionId":"%b"', 1)

    def render(self, receipts: Iterable[tuple[PlainSend, AppendResult]], code: int) -> bytes:
        """Return the concatenated answer frames; one-way sends have none."""
        head, pack = self._head, _LENGTHS.pack
        frames: list[bytes] = []
        for (queue_id, unique, opaque, answered, _), (physical_offset, _, queue_offset) in receipts:
            if answered:
                text = head % (code, physical_offset, queue_id, queue_offset, unique.encode(), opaque)
                size = len(text)
                frames += (pack(size + 4, size), text)
        return b"".join(frames)


def render_send_response(
    request: RemotingCommand, code: int, stored: Stored, transaction_id: str, handle: str | None = None
) -> bytes:
    """Return the complete frame of an answer to a send."""
    if not transaction_id:
        extra = b""
    elif transaction_id.isalnum() and transaction_id.isascii():  # nothing to escape, as in the ids of all known clients
        extra = b',"transactionId":"%b"' % transaction_id.encode()
    else:
        extra = b',"transactionId":%b' % json.dumps(transaction_id).encode()
    msg_id = stored.msg_id.encode()
    if handle:
        extra += b',"recallHandle":"%b"' % handle.encode()
    head = _HEAD % (code, msg_id, stored.queue_id, stored.queue_offset, extra, request.opaque)
    size = len(head)
    return _LENGTHS.pack(size + 4, size) + head


def send_response(
    request: RemotingCommand, code: int, stored: Stored, unique: str, handle: str | None
) -> RemotingCommand:
    ext = {
        "MSG_REGION": REGION,
        "TRACE_ON": "true",
        "msgId": stored.msg_id,
        "queueId": str(stored.queue_id),
        "queueOffset": str(stored.queue_offset),
    }
    if unique:
        ext["transactionId"] = unique
    if handle:
        ext["recallHandle"] = handle
    return RemotingCommand.response(request, code, ext=ext)


def recall_handle(topic: str, broker: str, deliver_ms: int, unique: str) -> str:
    """Return the handle with which a producer can recall a timer message; `recall_message` parses it."""
    return base64.urlsafe_b64encode(f"v1 {topic} {broker} {deliver_ms + 1} {unique}".encode()).decode()
