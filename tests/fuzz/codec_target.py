"""The codec under damaged frames: all code that parses a peer's bytes, without sockets.

Only the documented errors may be raised, and no frame may take long.
"""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from access.permissions import super_users
from broker.pop.extra_info import ExtraInfo
from broker.requests.table import ROUTES as BROKER
from controller.requests import ROUTES as CONTROLLER
from namesrv.request_processor import ROUTES as NAME_SERVER
from neve.errors import NeveError, ProtocolError
from neve.record.bodies import decode_batch, inflate
from neve.record.codec import MalformedRecord, decode_record, iter_records
from neve.record.ids import parse_offset_msg_id
from neve.record.properties import bytes_to_properties, tags_code
from neve.remoting import body, headers
from neve.remoting.command import RemotingCommand, decode_command, encode_command
from neve.remoting.frame import FrameDecoder
from neve.remoting.signature import ACCESS_KEY, verify
from tests.fuzz.mutate import Mutator

#: CPU seconds that one frame may take; wall time would include the machine's other work.
FRAME_S = 1.0
ROUTES = {**NAME_SERVER, **CONTROLLER, **BROKER}
SEND_CODES = (10, 310, 320, 324, 325)
STRUCTS = (body.HeartbeatData, body.TopicConfig, body.TopicRouteData, body.SubscriptionData)
Errors = tuple[type[Exception], ...]
EXPECTED: Errors = (NeveError, MalformedRecord)


class TooSlow(Exception):
    """A frame took longer than FRAME_S."""


@dataclass
class CodecFigures:
    """The counts of a run."""

    frames: int = 0
    decoded: int = 0
    longest_s: float = 0.0
    rss_growth: int = 0
    errors: dict[str, int] = field(default_factory=dict)


def run(mutator: Mutator, frames: int, figures: CodecFigures) -> CodecFigures:
    """Feed that many mutated frames; the first undocumented error ends the run, with the bytes in its notes."""

    def alarm(_: int, __: object) -> None:
        raise TooSlow

    previous = signal.signal(signal.SIGVTALRM, alarm)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    decoder = FrameDecoder()
    try:
        for _ in range(frames):
            stream = mutator.frame()
            signal.setitimer(signal.ITIMER_VIRTUAL, FRAME_S)
            started = time.perf_counter()
            try:
                decoder = _feed(decoder, mutator.cut(stream), figures)
            except Exception as error:
                error.add_note(f"the stream was {stream.hex()}")
                raise
            figures.longest_s = max(figures.longest_s, time.perf_counter() - started)
            figures.frames += 1
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
    figures.rss_growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return figures


def _feed(decoder: FrameDecoder, pieces: list[bytes], figures: CodecFigures) -> FrameDecoder:
    """A decoder that met a fatal frame or is out of step is discarded, like its connection."""
    try:
        for piece in pieces:
            decoder.receive_data(piece)
            while (frame := decoder.next_frame()) is not None:
                command = decode_command(frame)
                figures.decoded += 1
                _sent_again(command)
                _parsed(command, figures)
    except ProtocolError:
        return FrameDecoder()
    return FrameDecoder() if decoder.pending else decoder


def _sent_again(command: RemotingCommand) -> None:
    """Encode a decoded command again, and check that it has the same meaning."""
    if not -(2**15) <= command.code < 2**15 or not -(2**15) <= command.version < 2**15:
        return  # The binary header has no room for it.
    try:
        again = decode_command(b"".join(encode_command(command))[4:])
    except ProtocolError as error:
        assert "a header of" in str(error) or "header fields" in str(error), error  # Longer than a header may be.
        return
    said = (again.opaque, again.flag, again.ext, again.body, again.remark or None)
    assert said == (command.opaque, command.flag, command.ext, command.body, command.remark or None)


def _parsed(command: RemotingCommand, figures: CodecFigures) -> None:
    """Pass each part of a frame to all code that reads such parts, whatever the code of the request."""
    ext, data = command.ext, command.body
    send: Any = _tried(figures, headers.parse_send_header, command.code if command.code in SEND_CODES else 310, ext)
    _tried(figures, headers.parse_header, ext, headers.PullMessageHeader)
    route = ROUTES.get(command.code)
    if route is not None and route.permission is not super_users:
        _tried(figures, lambda: list(route.permission(command, "cluster")))
    _tried(figures, verify, "secret", {**ext, ACCESS_KEY: "someone"}, data)
    for name in ext:
        _tried(figures, headers.require_int, ext, name)
        break
    value = _tried(figures, body.lenient_loads, data)
    if value is not None:
        _tried(figures, body.dumps_object_keys, value)
        for kind in STRUCTS:
            _tried(figures, body.convert, value, kind)
    _tried(figures, decode_record, data)
    _tried(figures, _all_records, data)
    _tried(figures, decode_batch, data)
    _tried(figures, inflate, data, send.sys_flag if send is not None else 0, 1 << 20, expected=ValueError)
    properties = ext.get("i") or ext.get("properties")
    if properties:
        tags_code(bytes_to_properties(properties.encode()).get("TAGS"))
    for name in ("extraInfo", "startOffsetInfo", "msgOffsetInfo"):
        if name in ext:
            _tried(figures, ExtraInfo.parse, ext[name])
    for name in ("msgId", "offset", "offsetMsgId"):
        if name in ext:
            _tried(figures, parse_offset_msg_id, ext[name], expected=ValueError)


def _all_records(data: bytes) -> None:
    for record in iter_records(data):
        record.properties.get("KEYS")


def _tried(
    figures: CodecFigures, act: Callable[..., Any], *arguments: Any, expected: type[Exception] | Errors = EXPECTED
) -> Any:
    """Return the result, or None after an error that the function documents."""
    try:
        return act(*arguments)
    except expected as error:
        name = type(error).__name__
        figures.errors[name] = figures.errors.get(name, 0) + 1
        return None
