"""The faults of a set in one round: a plan derived from a seed, without side effects. `Injector` executes it.

Which member has a role is known only at execution: equal seeds hit equal roles, not equal processes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum

import msgspec


class Kind(StrEnum):
    """The kinds of faults; `_WEIGHTS` determines their frequency."""

    KILL = "kill"  # kill -9 of all its processes
    STOP = "stop"  # SIGTERM: an operator's restart
    FREEZE = "freeze"  # SIGSTOP
    CUT = "cut"  # Cut two members off from each other.
    ISOLATE = "isolate"  # Cut one member off from the rest of the set, and perhaps from clients.
    RESET = "reset"  # Break connections, which may reconnect at once.
    HAND_OVER = "hand over"  # Request a switchover of the master, as `neve broker-set switchover` does.
    OFFLOAD = "offload"  # Archive everything and evict local messages.
    REPLACE = "replace"  # Remove a member for good, with its disk; a new member starts at its address.
    DESIGNATE = "designate"  # Request a forced election from the controller, as `mqadmin electMaster` does.


class Way(StrEnum):
    """The direction of a cut."""

    BOTH = "both ways"
    TO = "to it"  # The member receives nothing.
    FROM = "from it"  # The member's data do not arrive.


MASTER, SLAVE, OTHER_SLAVE, ANY = "the master", "a slave", "the other slave", "a member"
#: Faults under which no mode may lose messages.
HARMLESS = (Kind.RESET, Kind.HAND_OVER, Kind.OFFLOAD)
#: Faults without a duration.
_AT_ONCE = (Kind.RESET, Kind.HAND_OVER, Kind.OFFLOAD, Kind.DESIGNATE)

ALL = "all members"
CONTROLLER, NAME_SERVER = "controller", "namesrv"
CLIENTS = "clients"


class Fault(msgspec.Struct, frozen=True):
    """A fault from `at`, in seconds, for `lasts` seconds; a dead process is started again then."""

    at: float
    lasts: float
    kind: Kind
    target: str
    peer: str = ""  # The peer of a cut; the target of a switchover, "" for the member with the longest log.
    way: Way = Way.BOTH
    breaks: bool = False  # The healing breaks connections instead of delivering the held bytes.
    with_clients: bool = False  # Clients are cut off as well.

    def __str__(self) -> str:
        words = [self.kind, self.target]
        words += [f"{'to' if self.kind is Kind.HAND_OVER else 'from'} {self.peer}"] if self.peer else []
        words += [self.way] if self.kind in (Kind.CUT, Kind.ISOLATE) else []
        words += ["and from clients"] if self.with_clients else []
        return f"{' '.join(words)} for {self.lasts:.1f} s"


#: Kind, target, peer; frequency.
_WEIGHTS: dict[tuple[Kind, str, str], float] = {
    (Kind.KILL, MASTER, ""): 4,
    (Kind.KILL, SLAVE, ""): 3,
    (Kind.KILL, OTHER_SLAVE, ""): 1,
    (Kind.KILL, ALL, ""): 0.5,
    (Kind.KILL, CONTROLLER, ""): 1,
    (Kind.KILL, NAME_SERVER, ""): 0.5,
    (Kind.STOP, MASTER, ""): 1,
    (Kind.STOP, SLAVE, ""): 1,
    (Kind.FREEZE, MASTER, ""): 4,
    (Kind.FREEZE, SLAVE, ""): 2,
    (Kind.FREEZE, OTHER_SLAVE, ""): 1,
    (Kind.FREEZE, CONTROLLER, ""): 1,
    (Kind.CUT, MASTER, SLAVE): 3,
    (Kind.CUT, MASTER, OTHER_SLAVE): 1,
    (Kind.CUT, MASTER, CONTROLLER): 3,
    (Kind.CUT, SLAVE, CONTROLLER): 1,
    (Kind.CUT, MASTER, CLIENTS): 1,
    (Kind.CUT, MASTER, NAME_SERVER): 1,
    (Kind.ISOLATE, MASTER, ""): 4,
    (Kind.ISOLATE, SLAVE, ""): 2,
    (Kind.RESET, MASTER, ""): 1,
    (Kind.HAND_OVER, MASTER, ""): 2,
    (Kind.HAND_OVER, MASTER, SLAVE): 1,
    (Kind.HAND_OVER, MASTER, OTHER_SLAVE): 1,
    (Kind.OFFLOAD, MASTER, ""): 8,
    (Kind.OFFLOAD, ANY, ""): 4,
    (Kind.REPLACE, SLAVE, ""): 1.5,
    (Kind.REPLACE, OTHER_SLAVE, ""): 1.5,
    (Kind.DESIGNATE, SLAVE, ""): 1,
    (Kind.DESIGNATE, OTHER_SLAVE, ""): 1,
}
SHORTEST_S, LONGEST_S = 0.2, 5.0
MOST = 4


def plan(chance: random.Random, seconds: float, kinds: Sequence[Kind] = tuple(Kind)) -> list[Fault]:
    """Return the faults of a round of this duration, in order of their begin, with these kinds."""
    choices = {what: weight for what, weight in _WEIGHTS.items() if what[0] in kinds}
    faults = []
    for _ in range(chance.randint(1, MOST)):
        kind, target, peer = chance.choices(list(choices), list(choices.values()))[0]
        at = chance.uniform(0.2, max(0.3, seconds - 1.0))
        lasts = min(chance.uniform(SHORTEST_S, LONGEST_S), seconds - at)
        fault = Fault(
            at,
            0.0 if kind in _AT_ONCE else lasts,
            kind,
            target,
            peer,
            way=chance.choice(list(Way)),
            breaks=chance.random() < 0.5,
            with_clients=kind is Kind.ISOLATE and chance.random() < 0.5,
        )
        faults.append(fault)
    return sorted(faults, key=lambda one: one.at)
