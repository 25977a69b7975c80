"""The answer of a send: from a template, because its header differs in a few places only."""

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

# Formatted as bytes: a quarter of the time of a str that is encoded afterwards.
_HEAD = (
    '{"code":%d,"extFields":{"MSG_REGION":"' + REGION + '","TRACE_ON":"true","msgId":"%b","queueId":"%d",'
    '"queueOffset":"%d"%b},"flag":1,"language":"PYTHON","opaque":%d,"serializeTypeCurrentRPC":"JSON","version":'
    + str(int(VERSION))
    + "}"
).encode()
_LENGTHS = struct.Struct(">ii")


@functools.lru_cache(maxsize=8)
def host_in_msg_id(address: tuple[str, int]) -> str:
    """What all ids of one broker begin with: to parse its address for each message took longer than to store it."""
    return offset_msg_id(address, 0)[:-16]


# Of a plain send: queue, unique id (ASCII letters and digits), opaque, whether it is answered (not one-way), whether it
# waits for the disk under SYNC_FLUSH.
PlainSend = tuple[int, str, int, bool, bool]


class ReceiptTemplate:
    """The answers of one broker to plain sends."""

    def __init__(self, address: tuple[str, int]) -> None:
        host = host_in_msg_id(address).encode()
        self._head = _HEAD.replace(b"%b", host + b"%016X", 1).replace(b"%b", b',"transactionId":"%b"', 1)

    def render(self, receipts: Iterable[tuple[PlainSend, AppendResult]], code: int) -> bytes:
        """The frames of all answers, one after another."""
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
    """The whole frame of an answer to a send."""
    if not transaction_id:
        extra = b""
    elif transaction_id.isalnum() and transaction_id.isascii():  # nothing to escape, as in all that clients make
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
    """What a producer gives back to recall a timer message; `recall_message` reads it."""
    return base64.urlsafe_b64encode(f"v1 {topic} {broker} {deliver_ms + 1} {unique}".encode()).decode()
