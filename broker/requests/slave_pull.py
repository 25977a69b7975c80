"""What a pull hears from a slave: messages that are confirmed, and never that its offset is wrong.

A slave may lack what its master has shown long since. So a pull that it has nothing for goes on where it was, as with
RocketMQ's slaves: at the master, where there is one (20, `suggestWhichBrokerId` 0), else here when its time is up (19).

It is held first where it may be, for a second at most if there is a master: a client whose route does not have it comes
back at once, each time, until it has asked its name server again.
"""

from __future__ import annotations

from collections.abc import Mapping

from neve.remoting.codes import GetMessageStatus, ResponseCode

_SENT_ON_AFTER_S = 1.0
# By these the reader knows what lies at its offset; by any other only what this slave lacks.
_TOLD: Mapping[GetMessageStatus, ResponseCode] = {
    GetMessageStatus.FOUND: ResponseCode.SUCCESS,
    GetMessageStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetMessageStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_RETRY_IMMEDIATELY,
}


def slave_code(status: GetMessageStatus, *, has_master: bool) -> ResponseCode:
    told = _TOLD.get(status)
    if told is not None:
        return told
    return ResponseCode.PULL_RETRY_IMMEDIATELY if has_master else ResponseCode.PULL_NOT_FOUND


def moves_on(status: GetMessageStatus) -> bool:
    """Whether the reader goes on where the result says; else at the offset that it asked for, and may wait there."""
    return status in _TOLD


def held_for(suspend: float, *, has_master: bool) -> float:
    """Seconds."""
    return min(suspend, _SENT_ON_AFTER_S) if has_master else suspend
