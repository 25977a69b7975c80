"""Answers of a slave to pulls: confirmed messages, but never an error about the offset.

A slave may lack messages that its master has made visible. A pull without messages therefore keeps its offset, as with
RocketMQ's slaves. If there is a master, the client repeats it there (20, `suggestWhichBrokerId` 0). Otherwise it is
repeated here when its time is up (19).

The pull is held first if the client allows that. With a master, it is held for one second at most. A client whose route
lacks the master repeats the pull immediately, until it refreshes the route.
"""

from __future__ import annotations

from collections.abc import Mapping

from neve.remoting.codes import GetMessageStatus, ResponseCode

_SENT_ON_AFTER_S = 1.0
# Statuses that describe messages at the pull's offset. All others only describe what this slave lacks.
_TOLD: Mapping[GetMessageStatus, ResponseCode] = {
    GetMessageStatus.FOUND: ResponseCode.SUCCESS,
    GetMessageStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetMessageStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_RETRY_IMMEDIATELY,
}


def slave_code(status: GetMessageStatus, *, has_master: bool) -> ResponseCode:
    """Return the code of a slave's answer to a pull."""
    answer = _TOLD.get(status)
    if answer is not None:
        return answer
    return ResponseCode.PULL_RETRY_IMMEDIATELY if has_master else ResponseCode.PULL_NOT_FOUND


def moves_on(status: GetMessageStatus) -> bool:
    """Return whether the result's next offset is valid; otherwise the pull keeps its offset, and may be held."""
    return status in _TOLD


def held_for(suspend: float, *, has_master: bool) -> float:
    """Return for how long (s) a pull is held."""
    return min(suspend, _SENT_ON_AFTER_S) if has_master else suspend
