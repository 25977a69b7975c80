"""Role of a broker in its set. Request handlers only read it; the set changes it.

role           broker                                                       serves
MASTER         the set's master, or a broker that is in no set              everything
SLAVE_IN_SYNC  a slave in the SyncStateSet, by a view that is still valid   reads, and the ends of queues
SLAVE          any other slave, and a member that waits for a master        reads of messages known to be confirmed
FENCED         not a member yet, or between two roles                       requests about the broker itself

A change between master and slave always passes through FENCED. No request is answered while the steps of a change (the
log's lock, the role-dependent state, the epoch) are in progress. A slave moves between SLAVE and SLAVE_IN_SYNC freely.

`has_master`: the master serves the requests that a slave refuses. It is true only while the slave is connected to its
master. Clients are not redirected to a master that may be dead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto


class Role(Enum):
    """Role of a broker. The table in the module's docstring explains each."""

    MASTER = auto()
    SLAVE_IN_SYNC = auto()
    SLAVE = auto()
    FENCED = auto()


#: Allowed changes of role.
FOLLOWING: Mapping[Role, frozenset[Role]] = {
    Role.MASTER: frozenset({Role.MASTER, Role.FENCED}),
    Role.SLAVE_IN_SYNC: frozenset({Role.SLAVE_IN_SYNC, Role.SLAVE, Role.FENCED}),
    Role.SLAVE: frozenset({Role.SLAVE_IN_SYNC, Role.SLAVE, Role.FENCED}),
    Role.FENCED: frozenset(Role),
}


class BrokerRole:
    """Role of one broker. All code may read `current`, `is_master` and `has_master`; only the owner calls `become`."""

    def __init__(self, role: Role = Role.MASTER) -> None:
        self.current = role
        self.is_master = role is Role.MASTER
        self.has_master = False
        self._callbacks: list[Callable[[], None]] = []

    def on_change(self, callback: Callable[[], None]) -> None:
        """Register a callback for each change. Callbacks run in the order of registration."""
        self._callbacks.append(callback)

    def become(self, role: Role, *, has_master: bool = False) -> None:
        """Change the role, which is valid from the next request on, and run the callbacks."""
        assert role in FOLLOWING[self.current], f"from {self.current.name} to {role.name} leads FENCED alone"
        assert not has_master or role in (Role.SLAVE, Role.SLAVE_IN_SYNC), "only a slave has a master"
        if (role, has_master) == (self.current, self.has_master):
            return
        self.current, self.has_master = role, has_master
        self.is_master = role is Role.MASTER
        for callback in self._callbacks:
            callback()
