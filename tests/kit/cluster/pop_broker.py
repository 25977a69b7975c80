"""A fake broker with one group that pops, for a `fake_cluster`."""

from __future__ import annotations

import base64

from neve.remoting.body import dumps, loads_as
from neve.remoting.command import RemotingCommand
from tests.kit.cluster.fake_cluster import Answer
from tests.kit.cluster.group_broker import GroupBroker, record

POP, ACK, CHANGE = 200050, 200051, 200053
RETRY_TOPIC = "%RETRY%g"


class PopBroker(GroupBroker):
    """The first pop returns all messages. Later pops get no answer."""

    def __init__(self, count: int, *, pop_time: int = 1_000_000) -> None:
        super().__init__(count)
        self.pop_time = pop_time
        self.pops: list[RemotingCommand] = []
        self.acked: list[int] = []
        self.let_go: list[tuple[int, int]] = []  # offset, invisible time in ms

    def __call__(self, request: RemotingCommand) -> Answer:
        ext = request.ext
        if request.code in self.refused:
            return 1, {}, b""
        if request.code in self.silent:
            return None
        match request.code:
            case 400:
                topic = loads_as(request.body, dict)["topic"]
                queue = {"topic": topic, "brokerName": "b0", "queueId": 0}
                mode = "PULL" if topic == RETRY_TOPIC else "POP"
                return 0, {}, dumps({"messageQueueAssignments": [{"messageQueue": queue, "mode": mode}]})
            case 200050:
                return self._pop(request)
            case 200051:
                self.acked.append(int(ext["offset"]))
                return 0, {}, b""
            case 200151:
                for ack in loads_as(request.body, dict)["acks"]:
                    bits = int.from_bytes(base64.b64decode(ack["b"]), "little")
                    self.acked += [ack["so"] + bit for bit in range(bits.bit_length()) if bits >> bit & 1]
                return 0, {}, b""
            case 200053:
                self.let_go.append((int(ext["offset"]), int(ext["invisibleTime"])))
                return 0, {"popTime": str(self.pop_time), "invisibleTime": ext["invisibleTime"], "reviveQid": "0"}, b""
        return super().__call__(request)

    def _pop(self, request: RemotingCommand) -> Answer:
        self.pops.append(request)
        if len(self.pops) > 1:
            return None
        times = {"popTime": str(self.pop_time), "invisibleTime": request.ext["invisibleTime"], "reviveQid": "0"}
        where = {"startOffsetInfo": "0 0 0", "msgOffsetInfo": f"0 0 {','.join(map(str, range(self.count)))}"}
        return 0, {**times, **where}, b"".join(record(number) for number in range(self.count))


class RetryBroker(PopBroker):
    """A broker whose messages are in %RETRY%g for pulls. Pops return nothing."""

    def __init__(self, count: int, *, min_offset: int = 0) -> None:
        super().__init__(count)
        self.min_offset = min_offset
        self.silent = {POP}

    def _pull(self, ext: dict[str, str]) -> Answer:
        return super()._pull({**ext, "topic": "t" if ext["topic"] == RETRY_TOPIC else ""})
