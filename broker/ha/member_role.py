"""Role of a member's broker for its clients, by the state of the member and of its log and tables."""

from __future__ import annotations

from collections.abc import Callable

from broker.ha.admission import MemberAdmission
from broker.ha.ha_client import HaClient
from broker.ha.member import LEADING, Member, State
from broker.ha.slave_session import SlaveState
from broker.role import FOLLOWING, BrokerRole, Role


class MemberRole:
    """The role, and the facts that it depends on besides the member. A change of a fact is followed by `update`."""

    def __init__(
        self,
        role: BrokerRole,
        member: Member,
        admission: MemberAdmission,
        *,
        register: Callable[[], None],
        admits_stock: bool,
    ) -> None:
        """`register` registers the present role at the name servers."""
        self.broker, self._member, self._admission = role, member, admission
        self.register, self.admits_stock = register, admits_stock
        self.leads = False  # the log accepts own records
        self.is_truncating = False  # a diverged tail is being truncated, until the tables are loaded again
        self.is_reloading = False  # the tables are being loaded again
        self.client: HaClient | None = None  # connection to the master, of a slave
        role.become(Role.FENCED)

    @property
    def is_attached(self) -> bool:
        """Return whether a slave's whole log is the master's, and the connection is streaming."""
        session = self.client.session if self.client is not None else None
        return session is not None and session.state is SlaveState.FOLLOWING

    @property
    def registered_as(self) -> int | None:
        """Return the id to register at the name servers: 0 for the master; None: don't register.

        A slave of Apache's gets the address of its master's HA port from the name servers only, and its master may need
        it before it can lead.
        """
        if self.broker.is_master or (self.admits_stock and self._member.confirming is not None):
            return 0
        return None if self.broker.current is Role.FENCED else self._member.broker_id

    def update(self) -> None:
        """Set the broker's role for its clients."""
        member, state = self._member, self._member.state
        self._admission.leads = self.leads and state is State.MASTER
        if self.leads:
            role = Role.MASTER
        elif not member.is_readable or self.is_truncating or self.is_reloading:
            role = Role.FENCED
        elif member.record.is_in_sync and (self.is_attached or state in LEADING):
            role = Role.SLAVE_IN_SYNC
        else:
            role = Role.SLAVE
        if role not in FOLLOWING[self.broker.current]:
            self.broker.become(Role.FENCED)
        self.broker.become(role, has_master=self.is_attached and role is not Role.FENCED)
