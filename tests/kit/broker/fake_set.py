"""A broker set whose slaves are controlled by a test."""

from __future__ import annotations

from broker.broker_controller import BrokerController


class FakeSet:
    """Slaves that confirm the broker's log: all of it, at once, until they are held."""

    def __init__(self) -> None:
        self.leads = self.has_enough = True
        self.confirm = self.asked = 0
        self.silent_because = "nobody is heard"
        self._held = False
        self._broker: BrokerController | None = None

    def may_append(self) -> bool:
        self.asked += 1
        return self.has_enough

    def acknowledged(self) -> int:
        return self.confirm

    def why_silent(self) -> str:
        return self.silent_because

    def appended(self) -> None:
        if not self._held:
            self.catch_up()

    # -- called by the test

    def join(self, broker: BrokerController) -> None:
        """Connect the started broker: from now on its readers see the confirmed log."""
        self._broker = broker
        broker.store.visibility.join_set(broker.store.max_physical_offset)
        self.catch_up()

    def hold(self) -> None:
        """Stop the slaves from confirming."""
        self._held = True

    def let_go(self) -> None:
        """Let the slaves confirm everything, now and later."""
        self._held = False
        self.catch_up()

    def catch_up(self) -> None:
        """Let the slaves confirm the present log."""
        if self._broker is not None:
            self.confirm_to(self._broker.store.max_physical_offset)

    def confirm_to(self, offset: int) -> None:
        """Let the slaves confirm the log up to this position."""
        broker = self._broker
        assert broker is not None and broker.group_transfer is not None
        self.confirm = offset
        broker.store.visibility.confirm(offset)
        broker.group_transfer.confirmed()
