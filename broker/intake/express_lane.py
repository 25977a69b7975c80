"""Express lane for plain sends: they need only a check and an append, and are parsed from the receive buffer.

Nearly all sends are plain. The lane takes the plain frames of one socket read, appends them with one write, and answers
them with one write. No header map, command or answer object is created. If many of them need queue files to be created
or mapped first, the rest of the read waits for the next turn of the event loop.

A frame that is unusual in any way, or cannot be stored, is put back unchanged. The ordinary send handler then processes
it through `Intake.send`, with the same result.

If requests have to be signed, a send is plain only if its signature is valid and its user may send to the topic. The
ordinary handler decides about all others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from struct import Struct
from typing import cast

import msgspec

from access.signed_sends import SignedSends
from broker.broker_stats import BrokerStats, Traffic
from broker.config import BrokerConfig
from broker.intake.acknowledgement import Acknowledgement
from broker.intake.intake import Intake, cached_tags_code, with_unique_id
from broker.intake.log_writer import LogWriter
from broker.intake.receipts import PlainSend, ReceiptTemplate
from broker.store.appender import AppendResult, Send
from broker.store.errors import StoreError
from broker.tables.topic_config_manager import TopicConfig, TopicConfigManager
from infra.clock import Clock
from infra.net.remoting_server import Connection
from neve.record.layout import MULTI_TAGS, PROPERTIES_LENGTH_MAX
from neve.remoting.command import FLAG_ONEWAY
from neve.remoting.frame import MARK_SIZE, FrameDecoder
from neve.remoting.headers import SendV2Frame, SignedSendHeaderV2, SignedSendV2Frame, covered
from neve.remoting.names import RETRY_PREFIX, may_be_sent_to
from neve.remoting.signature import SigningKey, count_right

# The JSON header of a SEND_MESSAGE_V2 begins with this text in all known clients.
_START = b'{"code":310,'
# In most spellings more than a record's properties may have; a send with a longer header is not plain.
_HEADER_MAX = 64 * 1024
# Queues whose files may be created or mapped for one read before the lane yields: a few milliseconds of work.
_FILES_IN_A_TURN = 16
# The mark word of a JSON frame holds the header's length and nothing else, because the JSON type is 0.
_header_length = Struct(">I").unpack_from
# Key in the connection's state: the number of frames to parse before their signatures are checked together. It doubles
# each time all parsed frames were taken, and is reset to 1 when a parsed frame was not taken. So no sender can cause
# more frames to be parsed twice than were taken before.
_AHEAD = "express.ahead"
_AHEAD_MAX = 1024
_decode = msgspec.json.Decoder(SendV2Frame, strict=False).decode
_decode_signed = msgspec.json.Decoder(SignedSendV2Frame, strict=False).decode


@dataclass(slots=True)
class SendRules:
    """Topic settings that apply to the plain sends of one read."""

    topic: str
    config: TopicConfig
    queue_nums: int
    sys_flag: int
    traffic: Traffic
    # The user who signed the last send, and the signing key; the key is set only if the user may send here.
    user: str | None = None
    key: SigningKey | None = None


# The frame's start in the buffer, the rules of its topic, the parsed send, its body.
_ReadSend = tuple[int, SendRules, SendV2Frame | SignedSendV2Frame, bytes]


@dataclass(slots=True)
class _Batch:
    """The plain sends of one read, as parallel lists; `starts` are the buffer positions of their frames."""

    now: int
    started: float  # seconds of the monotonic clock
    sends: list[Send] = field(default_factory=list)
    asked: list[PlainSend] = field(default_factory=list)
    traffics: list[Traffic] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


class ExpressSend:
    """Express lane of sends; `serve` is the `express` callback of a request router."""

    def __init__(
        self,
        intake: Intake,
        writer: LogWriter,
        config: BrokerConfig,
        clock: Clock,
        *,
        answers: Acknowledgement,
        topics: TopicConfigManager,
        stats: BrokerStats,
        signed_sends: SignedSends | None,
        address: tuple[str, int],
    ) -> None:
        """`signed_sends` checks signatures and permissions; None: requests are unsigned and every client may send."""
        self._intake, self._writer, self._config, self._clock = intake, writer, config, clock
        self._topics, self._stats, self._signed_sends = topics, stats, signed_sends
        self._file_budget, self._set_takes = writer.file_budget, writer.takes
        self._queue_of, self._stamped, self._special = writer.queue_of, intake.stamp.stamped, intake.special_properties
        self._decode: Callable[[bytes], SendV2Frame | SignedSendV2Frame]
        self._decode = _decode if signed_sends is None else _decode_signed
        self._template = ReceiptTemplate(address)
        self._last: SendRules | None = None  # of the last read, because most reads go to the same topic
        self._answers_later, self._when_durable = answers.answers_later, answers.acknowledge
        self._next_unique_id = intake.stamp.next_unique_id

    def serve(self, connection: Connection, frames: FrameDecoder) -> None:
        """Store and answer plain sends from `frames`, until a frame is not plain, none is left, or the lane yields."""
        if not self._intake.is_open or (self._set_takes is not None and not self._set_takes()):
            return
        buffer, file_budget = frames.buffer, self._file_budget
        file_budget.left = _FILES_IN_A_TURN
        try:
            batch = self._collect(frames) if self._signed_sends is None else self._collect_signed(connection, frames)
            if batch is not None and batch.sends:
                is_spent = file_budget.left == 0
                file_budget.left = _FILES_IN_A_TURN
                stored = self._append(batch, connection)
                if stored < len(batch.starts):
                    frames.put_back(buffer, batch.starts[stored], len(batch.starts) - stored)
                if is_spent or file_budget.left == 0:
                    connection.rest()
        finally:
            file_budget.left = None

    def _collect(self, frames: FrameDecoder) -> _Batch | None:
        """Return the plain sends before the first frame that is not plain, and put that frame back."""
        buffer = frames.buffer
        batch: _Batch | None = None
        rules: SendRules | None = None
        while (read := self._next(frames, rules)) is not None:
            start, rules, send, body = read
            if batch is None:
                batch = _Batch(self._clock.now_ms(), self._clock.monotonic())
            if not self._take(batch, rules, send, body):
                frames.put_back(buffer, start)
                break
            batch.starts.append(start)
        return batch

    def _collect_signed(self, connection: Connection, frames: FrameDecoder) -> _Batch | None:
        """Return the plain sends as `_collect` does, if their signatures are valid and their users may send.

        Frames are parsed in growing groups, and the signatures of a group are checked together.
        """
        buffer = frames.buffer
        batch: _Batch | None = None
        rules: SendRules | None = None
        ahead: int = connection.state.get(_AHEAD, 1)
        while read := self._read_ahead(frames, ahead, rules):
            if batch is None:
                batch = _Batch(self._clock.now_ms(), self._clock.monotonic())
            taken = 0
            for start, rules, send, body in read[: self._count_signed(connection, read)]:
                if not self._take(batch, rules, send, body):
                    break
                batch.starts.append(start)
                taken += 1
            if taken < len(read):
                frames.put_back(buffer, read[taken][0], len(read) - taken)
                ahead = 1
                break
            if taken < ahead:
                break
            ahead = min(2 * ahead, _AHEAD_MAX)
        connection.state[_AHEAD] = ahead
        return batch

    def _read_ahead(self, frames: FrameDecoder, most: int, rules: SendRules | None) -> list[_ReadSend]:
        """Return up to `most` sends; `rules` are those of the send before."""
        read: list[_ReadSend] = []
        while len(read) < most and (one := self._next(frames, rules)) is not None:
            rules = one[1]
            read.append(one)
        return read

    def _next(self, frames: FrameDecoder, rules: SendRules | None) -> _ReadSend | None:
        """Return the next send, or None.

        None means that no whole frame has been received, or that the next frame is not for this lane and was put back.
        `rules` are those of the send before.
        """
        bounds = frames.next_bounds()
        if bounds is None:
            return None
        buffer, (start, end) = frames.buffer, bounds
        header_at = start + MARK_SIZE
        body_at = header_at + _header_length(buffer, start)[0]
        if body_at <= end and body_at - header_at <= _HEADER_MAX and buffer.startswith(_START, header_at):
            try:
                send = self._decode(buffer[header_at:body_at])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                frames.put_back(buffer, start)
                return None
            if rules is None or rules.topic != send.header.topic:
                rules = self._rules(send.header.topic)
            if rules is not None:
                return start, rules, send, buffer[body_at:end]
        frames.put_back(buffer, start)
        return None

    def _count_signed(self, connection: Connection, read: list[_ReadSend]) -> int:
        """Return how many sends precede the first one without a valid signature of a permitted user.

        Users and policies do not change within one read. Signatures are checked back to back with no other work between
        them, so that the code of the hash function stays in the processor's cache.
        """
        assert self._signed_sends is not None
        headers = cast("list[SignedSendHeaderV2]", [send.header for _, _, send, _ in read])
        claims = []
        for (_, rules, _, body), header, text in zip(read, headers, covered(headers), strict=True):
            if header.access_key != rules.user:
                rules.user = header.access_key
                rules.key = self._signed_sends.key_of(connection, header.access_key, rules.topic)
            claims.append((rules.key, header.signature, text, body))
        return count_right(claims)

    def _rules(self, topic: str) -> SendRules | None:
        topics, rules = self._topics, self._last
        config = topics.topics.get(topic)
        if rules is None or rules.config is not config:
            if config is None or not may_be_sent_to(topic) or topic.startswith(RETRY_PREFIX):
                return None
            sys_flag = MULTI_TAGS if config.topic_filter_type == "MULTI_TAG" else 0
            rules = self._last = SendRules(topic, config, config.queue_nums, sys_flag, self._stats.of_topic(topic))
        else:  # each change of a topic puts a new object into the table, so `config` is current
            rules.user, rules.key, rules.traffic = None, None, self._stats.of_topic(topic)
        if topics.unsaved and not topics.is_saved(topic):
            return None
        return rules

    def _take(self, batch: _Batch, rules: SendRules, send: SendV2Frame | SignedSendV2Frame, body: bytes) -> bool:
        """Add the send to the batch if it is plain; return whether it is."""
        header, text = send.header, send.header.properties or ""
        try:
            properties = dict([pair.split("\x01", 1) for pair in text.split("\x02") if pair])
        except ValueError:  # a pair without its separator
            return False
        queue_id = header.queue_id
        if (
            not 0 <= queue_id < rules.queue_nums
            or header.batch
            or send.flag & ~FLAG_ONEWAY
            or len(body) > self._config.max_message_size
            or not self._special.isdisjoint(properties)
        ):
            return False
        unique, tags, keys = properties.get("UNIQ_KEY"), properties.get("TAGS"), properties.get("KEYS")
        if not unique:
            unique = self._next_unique_id(batch.now)
            text = with_unique_id(text, unique)
        elif not unique.isalnum() or not unique.isascii():  # would need escaping in the JSON answer
            return False
        raw = self._stamped(text)
        if len(raw) > PROPERTIES_LENGTH_MAX:
            return False
        try:
            queue = self._queue_of(rules.topic, queue_id)
        except StoreError:
            return False
        batch.sends.append((
            queue, body, raw, cached_tags_code(tags) if tags else 0, f"{unique} {keys}" if keys else unique,
            header.flag, header.sys_flag | rules.sys_flag, header.born_timestamp, header.reconsume_times or 0, 0,
        ))  # fmt: skip
        batch.asked.append((queue_id, unique, send.opaque, send.flag == 0, properties.get("WAIT") != "false"))
        batch.traffics.append(rules.traffic)
        return True

    def _append(self, batch: _Batch, connection: Connection) -> int:
        """Store and answer as many sends as possible, in order; return their number.

        The first send that cannot be stored and all after it are left to the caller.
        """
        try:
            places = self._writer.append(batch.sends, connection.remote, batch.now)
        except StoreError:
            return 0
        sizes, traffics = [size for _, size, _ in places], batch.traffics
        total = sum(sizes)
        if traffics.count(traffics[0]) == len(traffics):  # nearly always, all sends are to one topic
            traffics[0].add(len(sizes), total, len(sizes))
        else:
            for traffic, size in zip(traffics, sizes, strict=False):
                traffic.add(1, size)
        self._intake.count(len(sizes), total)
        self._answer(connection, list(zip(batch.asked, places, strict=False)), batch.started)
        return len(places)

    def _answer(self, connection: Connection, receipts: list[tuple[PlainSend, AppendResult]], started: float) -> None:
        """Answer stored sends: at once, or after disk and replicas where the sender waits for them (property WAIT)."""
        waiting = receipts
        if self._answers_later and (others := [receipt for receipt in receipts if not receipt[0][4]]):
            waiting = [receipt for receipt in receipts if receipt[0][4]]
            self._acknowledge(connection, others, started, waits=False)
        if waiting:
            self._acknowledge(connection, waiting, started, waits=True)

    def _acknowledge(
        self,
        connection: Connection,
        receipts: list[tuple[PlainSend, AppendResult]],
        started: float,
        *,
        waits: bool,
    ) -> None:
        physical_offset, size, _ = receipts[-1][1]
        render = functools.partial(self._template.render, receipts)
        self._when_durable(connection, physical_offset + size, render, started, len(receipts), waits=waits)
