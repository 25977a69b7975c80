"""Lasting conditions: functions that a server lacks now, since when, why, the effect on its users, and the remedy."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from typing_extensions import override

from infra.clock import Clock
from infra.net.tls import Certificate

_DAY_S = 86_400
_WARNED_S = 14 * _DAY_S
_LOOK_S = 60.0  # period of a check of the certificate, which is a TLS handshake in memory

EXPIRED, EXPIRES = "certificate expired", "certificate ends soon"


class Condition(NamedTuple):
    """One condition. `means`: its effect on users; `then`: what ends it. `since_ms` is 0 if the source has no time."""

    name: str
    since_ms: int
    why: str
    means: str
    then: str

    @override
    def __str__(self) -> str:
        return f"{self.why}; {self.means}; {self.then}"

    @property
    def line(self) -> str:
        """The condition as one line of a page."""
        return f"{self.name}{_since(self.since_ms)}: {self}"


class ConditionLog:
    """Dates conditions without a time of their own, and logs the beginning and the end of each."""

    def __init__(self, clock: Clock, log: logging.Logger) -> None:
        self._clock, self._log = clock, log
        # Name -> beginning (ms), of the conditions at the last `look`.
        self._seen: dict[str, int] = {}

    def dated(self, found: Iterable[Condition]) -> list[Condition]:
        """Return the conditions with the time of their beginning."""
        now_ms = self._clock.now_ms()
        return [one if one.since_ms else one._replace(since_ms=self._seen.get(one.name, now_ms)) for one in found]

    def look(self, found: Sequence[Condition]) -> None:
        """Log changes; called periodically with all current conditions."""
        dated, now_ms = {one.name: one for one in self.dated(found)}, self._clock.now_ms()
        for name, one in dated.items():
            if name not in self._seen:
                self._log.warning("%s: %s", name, one)
        for name, since_ms in self._seen.items():
            if name not in dated:
                self._log.warning("%s: ended after %d s", name, max(now_ms - since_ms, 0) // 1000)
        self._seen = {name: one.since_ms for name, one in dated.items()}


class CertificateConditions:
    """The conditions of the certificate that this server presents to clients."""

    def __init__(self, clock: Clock, certificate: Certificate | None) -> None:
        self._clock, self._certificate = clock, certificate
        self._ends: tuple[float, str | None] = (float("inf"), None)  # end (s) and error
        self._updated_s = float("-inf")
        self._was = None if certificate is None else certificate.context

    def now(self) -> list[Condition]:
        """Return a condition if the certificate has expired or will soon."""
        certificate, now = self._certificate, self._clock.monotonic()
        if certificate is None:
            return []
        context = certificate.context  # a new one if the files have changed
        if now - self._updated_s >= _LOOK_S or context is not self._was:
            self._updated_s, self._was = now, context
            try:
                self._ends = certificate.ends_s(), None
            except (ssl.SSLError, OSError) as error:
                self._ends = 0.0, str(error)
        ends_s, fault = self._ends
        left_s = ends_s - self._clock.now_ms() / 1000
        if left_s > _WARNED_S:
            return []
        means = "clients that check it cannot connect; existing connections continue"
        then = "new certificate files are used from the next connection, without a restart"
        if left_s <= 0:
            return [Condition(EXPIRED, int(ends_s * 1000), fault or "it has expired", means, then)]
        text = f"in {left_s / _DAY_S:.1f} days"
        return [Condition(EXPIRES, 0, text, f"then {means}", then)]


def _since(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime(" since %Y-%m-%d %H:%M:%S UTC") if time_ms else ""
