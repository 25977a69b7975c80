"""Rows of a broker's request codes: besides permissions, the roles that serve each, and the answers that wait.

A slave of RocketMQ 5.3 also serves requests that its master does not learn of, like queue locks and committed offsets.
A neve slave refuses these, because conflicting promises of two members would break both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from access.route import Route
from broker.role import Role
from neve.remoting.codes import ResponseCode


class Refusal(NamedTuple):
    """Answer of a role that does not serve a request."""

    code: ResponseCode
    remark: str


FENCED = Refusal(ResponseCode.SERVICE_NOT_AVAILABLE, "service not available now: this broker has no role in its set")
# Producers and consumers retry with another broker, or later with this one.
SLAVE = Refusal(ResponseCode.SYSTEM_BUSY, "[REJECTREQUEST]system busy, start flow control for a while: a slave")
NOT_IN_SYNC = Refusal(
    ResponseCode.SYSTEM_BUSY, "[REJECTREQUEST]system busy, start flow control for a while: a slave that is not in sync"
)
_NO_CHANGE = Refusal(
    ResponseCode.SYSTEM_ERROR,
    "Can't modify topic or subscription group from slave broker, please execute it from master broker.",
)


class Roles(NamedTuple):
    """The roles that serve a request, and the answer of a slave that does not."""

    serving: frozenset[Role]
    of_a_slave: Refusal = SLAVE


#: Requests that append messages or make promises.
MASTER = Roles(frozenset({Role.MASTER}))
#: Changes of tables, which are logged first.
MASTER_CHANGE = MASTER._replace(of_a_slave=_NO_CHANGE)
#: Bounds of queues and progress of groups. Clients reset offsets by them, and a member without all confirmed records
#: would return too low ones.
IN_SYNC = Roles(frozenset({Role.MASTER, Role.SLAVE_IN_SYNC}), NOT_IN_SYNC)
#: Messages, tables, and clients by group. A slave's visible messages are confirmed and can't disappear. It serves pulls
#: only with `slaveReadEnable`.
MEMBERS = Roles(frozenset({Role.MASTER, Role.SLAVE_IN_SYNC, Role.SLAVE}))
#: Requests about the broker itself and its connections.
ANY_ROLE = Roles(frozenset(Role))


def master_else(code: ResponseCode, remark: str) -> Roles:
    """Return the master's role, with the refusal of a slave that RocketMQ has for this request."""
    return MASTER._replace(of_a_slave=Refusal(code, remark))


class Waits(Enum):
    """Whether an answer promises a record, and where it then waits until the set has it.

    This includes records of an earlier attempt of the same request. An acknowledgement without effect therefore waits
    until the whole log is confirmed, because the record of the earlier attempt could still be truncated.
    """

    #: A wrapper of the handler waits (`replicated_answers`).
    YES = "yes"
    #: The handler waits: a send is answered without a task of its own (`Intake.acknowledge`), and a pop waits together
    #: with its messages (`pop_message`).
    IN_HANDLER = "in handler"
    #: The answer promises no record: a read, or state of this broker only. A committed offset is no record: slaves poll
    #: it, and a failover loses the last seconds of it, as in RocketMQ.
    NO = "no"


@dataclass(frozen=True)
class BrokerRoute(Route):
    """The facts about a request code of a broker; a decorator of its handler."""

    roles: Roles
    waits: Waits
    #: The handler reads the topic in the field `topic`: a hidden one is refused, as if it did not exist.
    hides_topics: bool = field(kw_only=True)

    def refusal(self, role: Role) -> Refusal | None:
        """Return the refusal in a role, None if it serves the request."""
        if role in self.roles.serving:
            return None
        return FENCED if role is Role.FENCED else self.roles.of_a_slave
