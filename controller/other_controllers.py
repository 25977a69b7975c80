"""Exchange of liveness between the controllers that share a register.

Without it, a controller that alone can't receive a broker's heartbeats would regard the broker as dead.
`etcd_controllers` implements the exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from controller.decision import Report

Heard = Mapping[int, Sequence[Report]]


class OtherControllers(Protocol):
    """The other controllers with the same register. All calls raise RegisterUnavailable if it does not answer."""

    @property
    def renew_s(self) -> float:
        """Period of `renew` in seconds, which other waits must not delay; 0: there are no other controllers."""

    async def reports_of(self, name: str) -> Heard:
        """Return the members of a set that each other controller reports as alive now."""

    async def publish(self, name: str, living: Mapping[int, Report]) -> None:
        """Publish the members of a set that are alive for this controller; readable by the others on return."""

    async def renew(self) -> None:
        """Keep the published reports valid. If they have expired already, the next `publish` publishes them again."""

    async def close(self) -> None:
        """Withdraw all published reports."""


class NoOtherControllers:
    """The exchange of a register that only this controller uses."""

    renew_s = 0.0

    async def reports_of(self, name: str) -> Heard:
        return {}

    async def publish(self, name: str, living: Mapping[int, Report]) -> None:
        pass

    async def renew(self) -> None:
        pass

    async def close(self) -> None:
        pass


NO_OTHER_CONTROLLERS = NoOtherControllers()
