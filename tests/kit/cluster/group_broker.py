"""A fake broker with one consumer group for a `fake_cluster`."""

from __future__ import annotations

import json
from typing import Any

from neve.record.codec import encode_record
from neve.record.properties import properties_to_bytes
from neve.remoting.body import dumps, loads_as
from neve.remoting.command import RemotingCommand
from tests.kit.cluster.fake_cluster import Answer, send_ok


class GroupBroker:
    """One queue of topic `t` with `count` messages, and one group. Pulls at the end get no answer."""

    def __init__(self, count: int, *, min_offset: int = 0, stored: int | None = None) -> None:
        self.count = count
        self.min_offset = min_offset
        self.offsets: dict[str, int] = {} if stored is None else {"t": stored}
        self.members: list[str] = []
        self.pulls: list[int] = []  # offsets of the answered pulls
        self.sent_back: list[dict[str, str]] = []
        self.locks_are = "granted"  # or refused, or failing
        self.unlocked: list[Any] = []
        self.refused: set[int] = set()  # request codes answered with an error
        self.silent: set[int] = set()  # request codes without an answer

    def __call__(self, request: RemotingCommand) -> Answer:
        ext = request.ext
        if request.code in self.refused:
            return 1, {}, b""
        if request.code in self.silent:
            return None
        match request.code:
            case 34:
                self.members = [loads_as(request.body, dict)["clientID"]]
            case 38:
                return (0, {}, dumps({"consumerIdList": self.members})) if self.members else (1, {}, b"")
            case 14:
                found = self.offsets.get(ext["topic"])
                return (22, {}, b"") if found is None else (0, {"offset": str(found)}, b"")
            case 15:
                self.offsets[ext["topic"]] = int(ext["commitOffset"])
            case 29 | 31:
                return 0, {"offset": str(self.min_offset if ext["topic"] == "t" else 0)}, b""
            case 30:
                return 0, {"offset": str(self.count if ext["topic"] == "t" else 0)}, b""
            case 36:
                self.sent_back.append(ext)
            case 41 | 42:
                return self._lock(request)
            case 11:
                return self._pull(ext)
            case 310:
                return send_ok(request)
        return 0, {}, b""

    def _lock(self, request: RemotingCommand) -> Answer:
        queues = json.loads(request.body)["mqSet"]
        if request.code == 42:
            self.unlocked += queues
            return 0, {}, b""
        if self.locks_are == "failing":
            return 1, {}, b""
        return 0, {}, dumps({"lockOKMQSet": queues if self.locks_are == "granted" else []})

    def _pull(self, ext: dict[str, str]) -> Answer:
        offset = int(ext["queueOffset"])
        end = min(self.count, offset + int(ext["maxMsgNums"]))
        if ext["topic"] != "t" or offset >= end:
            return None
        self.pulls.append(offset)
        where = {"suggestWhichBrokerId": "0", "minOffset": str(self.min_offset), "maxOffset": str(self.count)}
        if offset < self.min_offset:
            return 21, {**where, "nextBeginOffset": str(self.min_offset)}, b""
        return 0, {**where, "nextBeginOffset": str(end)}, b"".join(record(number) for number in range(offset, end))


def record(offset: int, *, body: bytes = b"x" * 10, sys_flag: int = 0) -> bytes:
    """Return a committed transactional record with a tag by its offset."""
    tag = "even" if offset % 2 == 0 else "odd"
    return encode_record(
        topic=b"t",
        body=body,
        properties=properties_to_bytes({"TAGS": tag, "UNIQ_KEY": f"key{offset}", "TRAN_MSG": "true"}),
        queue_id=0,
        flag=0,
        queue_offset=offset,
        physical_offset=offset * 100,
        sys_flag=sys_flag,
        born_timestamp=1,
        born_host=("127.0.0.1", 1),
        store_timestamp=1,
        store_host=("127.0.0.1", 1),
    )
