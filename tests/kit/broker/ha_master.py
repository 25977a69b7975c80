"""A master's session without sockets, and the frames that its slave reads."""

from __future__ import annotations

from msgspec.structs import replace

from broker.ha.epochs import EpochCache
from broker.ha.frames import (
    Hello,
    MasterFrames,
    SlaveHandshake,
    StreamRefusal,
    Transfer,
    encode_ack,
    encode_hello,
    encode_slave_handshake,
)
from broker.ha.master_session import (
    Action,
    End,
    MasterSession,
    Send,
    StreamRules,
)
from tests.kit.broker.byte_log import ByteLog
from tests.kit.broker.ha_session import hello

A, B = 1, 2


class MasterEnd:
    """A master's session with its log, and the frames that a slave would read."""

    def __init__(
        self, log: ByteLog | None = None, epochs: EpochCache | None = None, nonce: str = "n1", **rules: object
    ) -> None:
        self.log = log or ByteLog()
        self.epochs = epochs if epochs is not None else EpochCache([(3, 0)])
        self.confirm = 0
        own = hello(A, nonce=nonce, eviction_frontier=7)
        self.session = MasterSession(
            self.log,
            self.epochs,
            own,
            StreamRules(**rules),  # type: ignore[arg-type]
            is_member={A, B, 3}.__contains__,
            confirm=lambda: self.confirm,
            now=0.0,
        )

    def greet(self, slave: Hello | None = None) -> list[Action]:
        return self.session.receive_data(encode_hello(slave or hello()), 0.0)

    def shake(self, **flags: bool) -> list[Action]:
        return self.session.receive_data(encode_slave_handshake(SlaveHandshake(B, **flags)), 0.0)

    def begin(self, at: int = 0, *, stock: bool = False) -> None:
        if not stock:
            self.greet()
        self.shake()
        self.session.receive_data(encode_ack(at, -1 if stock else at), 0.0)
        assert not self.session.is_ended

    def sends(self, now: float = 0.0) -> list[Transfer]:
        """Return the transfers of one turn."""
        return transfers(self.session.advance(now))


def frames(actions: list[Action]) -> list[object]:
    reader = MasterFrames()
    data = b"".join(bytes(part) for action in actions if isinstance(action, Send) for part in action.data)
    return [
        replace(frame, body=memoryview(bytes(frame.body))) if isinstance(frame, Transfer) else frame
        for frame in reader.receive_data(data)
    ]


def transfers(actions: list[Action]) -> list[Transfer]:
    got = frames(actions)
    assert all(isinstance(frame, Transfer) for frame in got)
    return [frame for frame in got if isinstance(frame, Transfer)]


def refused(actions: list[Action]) -> tuple[str, bool]:
    """Return the reason of a refusal, and whether the slave gets it."""
    end = actions[-1]
    assert isinstance(end, End)
    assert end.refusal is not None
    told = [frame for frame in frames(actions) if isinstance(frame, StreamRefusal)]
    assert told in ([], [end.refusal])
    return end.refusal.reason, bool(told)
