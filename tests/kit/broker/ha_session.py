"""The hello of a member, and why a session ended."""

from __future__ import annotations

from msgspec.structs import replace

from broker.ha.frames import (
    Hello,
)
from broker.ha.slave_session import (
    Action,
    End,
    Local,
)

A, B = 1, 2
EMPTY = Local(0, 0, (), 0, 0)


def hello(member_id: int = B, **other: object) -> Hello:
    own = Hello(
        cluster="c",
        broker_set="b",
        member_id=member_id,
        incarnation=f"i{member_id}",
        starts=1,
        process=f"p{member_id}",
        nonce=f"n{member_id}",
        mapped_file_size_commit_log=1 << 20,
        message_delay_level="1s 5s",
        master_epoch=3,
    )
    return replace(own, **other)


def why(actions: list[Action]) -> str:
    (end,) = actions
    assert isinstance(end, End)
    return end.refusal.reason if end.refusal is not None else end.why
