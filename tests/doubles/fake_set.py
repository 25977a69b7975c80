"""A broker set whose slaves a test moves."""

from __future__ import annotations

from broker.broker_controller import BrokerController


class FakeSet:
    """Says of the broker's log that the slaves have it: all of it, at once, until they are held."""

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

    # -- the test's

    def join(self, broker: BrokerController) -> None:
        """The broker has started: from now on its readers see what the slaves have."""
        self._broker = broker
        broker.store.join_set(broker.store.max_physical_offset)
        self.catch_up()

    def hold(self) -> None:
        """The slaves take nothing more."""
        self._held = True

    def let_go(self) -> None:
        """They have everything, and take what comes."""
        self._held = False
        self.catch_up()

    def catch_up(self) -> None:
        """They have what is there by now."""
        if self._broker is not None:
            self.confirm_to(self._broker.store.max_physical_offset)

    def confirm_to(self, offset: int) -> None:
        """They have the log so far."""
        broker = self._broker
        assert broker is not None and broker.group_transfer is not None
        self.confirm = offset
        broker.store.confirm(offset)
        broker.group_transfer.confirmed()
