"""What this broker is in its set: who reads it asks no more; the set alone changes it.

role           who                                                       serves
MASTER         the set's master, or a broker that is in no set           everything
SLAVE_IN_SYNC  a slave in the SyncStateSet, by a view that still counts  reads, and where queues begin and end
SLAVE          any other slave, and who waits for a master               reads of what it knows to be confirmed
FENCED         no member yet, or between two roles                       what tells of the broker itself

From one role to the other leads FENCED alone: what is answered in it was decided by neither, so all steps of a change
(the log's lock, the books, the epoch) lie between two answers. A slave falls in and out of sync as it goes.

`has_master`: somebody else takes what a slave refuses. A slave says so only while it is connected to its master: of one
that may be dead it sends nobody there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto


class Role(Enum):
    """See the module."""

    MASTER = auto()
    SLAVE_IN_SYNC = auto()
    SLAVE = auto()
    FENCED = auto()


#: Where each role leads.
FOLLOWING: Mapping[Role, frozenset[Role]] = {
    Role.MASTER: frozenset({Role.MASTER, Role.FENCED}),
    Role.SLAVE_IN_SYNC: frozenset({Role.SLAVE_IN_SYNC, Role.SLAVE, Role.FENCED}),
    Role.SLAVE: frozenset({Role.SLAVE_IN_SYNC, Role.SLAVE, Role.FENCED}),
    Role.FENCED: frozenset(Role),
}


class BrokerRole:
    """One for each broker. `current`, `is_master` and `has_master` are for reading; `become` is its owner's."""

    def __init__(self, role: Role = Role.MASTER) -> None:
        self.current = role
        self.is_master = role is Role.MASTER
        self.has_master = False
        self._callbacks: list[Callable[[], None]] = []

    def tell(self, callback: Callable[[], None]) -> None:
        """Call back after each change, in the order in which they asked."""
        self._callbacks.append(callback)

    def become(self, role: Role, *, has_master: bool = False) -> None:
        """Holds at once, for the next request; who waits is told."""
        assert role in FOLLOWING[self.current], f"from {self.current.name} to {role.name} leads FENCED alone"
        assert not has_master or role in (Role.SLAVE, Role.SLAVE_IN_SYNC), "only a slave has a master"
        if (role, has_master) == (self.current, self.has_master):
            return
        self.current, self.has_master = role, has_master
        self.is_master = role is Role.MASTER
        for callback in self._callbacks:
            callback()
