"""What a pull hears from a slave: messages that are confirmed, and never that its offset is wrong.

A slave may lack what its master has shown long since. So a pull that it has nothing for goes on where it was, as with
RocketMQ's slaves: at the master, where there is one (20, `suggestWhichBrokerId` 0); else it is held, and hears of
nothing new (19) when its time is up.
"""

from __future__ import annotations

from collections.abc import Mapping

from neve.remoting.codes import GetMessageStatus, ResponseCode

# By these the reader knows what lies at its offset; by any other only what this slave lacks.
_TOLD: Mapping[GetMessageStatus, ResponseCode] = {
    GetMessageStatus.FOUND: ResponseCode.SUCCESS,
    GetMessageStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetMessageStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_RETRY_IMMEDIATELY,
}


def slave_code(status: GetMessageStatus, *, has_master: bool) -> ResponseCode:
    """PULL_NOT_FOUND may be held, as a master's."""
    told = _TOLD.get(status)
    if told is not None:
        return told
    return ResponseCode.PULL_RETRY_IMMEDIATELY if has_master else ResponseCode.PULL_NOT_FOUND


def moves_on(status: GetMessageStatus) -> bool:
    """Whether the reader goes on where the result says, and not at the offset that it asked for."""
    return status in _TOLD
