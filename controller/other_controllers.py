"""What the controllers of one register tell each other: who is heard, by whom. Without that a broker that only one of
them can't hear would seem dead to that one. `etcd_controllers` is how they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from controller.decision import Report

Heard = Mapping[int, Sequence[Report]]


class OtherControllers(Protocol):
    """Those that have the same register. RegisterUnavailable where it does not answer."""

    @property
    def renew_s(self) -> float:
        """How often `renew` has to be called, whatever else is waited for; 0: never, there are no others."""

    async def heard(self, name: str) -> Heard:
        """Who of a set lives, as each of the others says now."""

    async def say(self, name: str, living: Mapping[int, Report]) -> None:
        """Who of a set lives, as this one hears; the others can read it when this returns."""

    async def renew(self) -> None:
        """What was said stays. Where it is gone already, `say` says it again."""

    async def close(self) -> None:
        """Nothing is said any more."""


class NoOtherControllers:
    """The register is this one's alone."""

    renew_s = 0.0

    async def heard(self, name: str) -> Heard:
        return {}

    async def say(self, name: str, living: Mapping[int, Report]) -> None:
        pass

    async def renew(self) -> None:
        pass

    async def close(self) -> None:
        pass


NO_OTHER_CONTROLLERS = NoOtherControllers()
