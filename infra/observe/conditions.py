"""What a server can't do now: since when, why, what that means to its users, what comes by itself; each told once."""

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
_LOOK_S = 60.0  # how often a certificate is looked at: a handshake with itself

EXPIRED, EXPIRES = "certificate expired", "certificate ends soon"


class Condition(NamedTuple):
    """One thing that a server can't do now: since when (ms), why, what it means for its users, what comes then."""

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
        """As the pages for people have it."""
        return f"{self.name}{_since(self.since_ms)}: {self}"


class ToldConditions:
    """Since when those are that don't know it themselves; the log has each once when it begins, once when it ends."""

    def __init__(self, clock: Clock, log: logging.Logger) -> None:
        self._clock, self._log = clock, log
        # By name, since when (ms): of those that the last look found.
        self._seen: dict[str, int] = {}

    def dated(self, found: Iterable[Condition]) -> list[Condition]:
        """Each with its beginning."""
        now_ms = self._clock.now_ms()
        return [one if one.since_ms else one._replace(since_ms=self._seen.get(one.name, now_ms)) for one in found]

    def look(self, found: Sequence[Condition]) -> None:
        """Again and again, with all that are so now."""
        dated, now_ms = {one.name: one for one in self.dated(found)}, self._clock.now_ms()
        for name, one in dated.items():
            if name not in self._seen:
                self._log.warning("%s: %s", name, one)
        for name, since_ms in self._seen.items():
            if name not in dated:
                self._log.warning("%s: no more, after %d s", name, max(now_ms - since_ms, 0) // 1000)
        self._seen = {name: one.since_ms for name, one in dated.items()}


class CertificateConditions:
    """Of the certificate by which clients know this server."""

    def __init__(self, clock: Clock, certificate: Certificate | None) -> None:
        self._clock, self._certificate = clock, certificate
        self._ends: tuple[float, str | None] = (float("inf"), None)  # s; what is wrong with it
        self._looked_s = float("-inf")
        self._was = None if certificate is None else certificate.context

    def now(self) -> list[Condition]:
        """None: it holds for a while, or there is none."""
        certificate, now = self._certificate, self._clock.monotonic()
        if certificate is None:
            return []
        context = certificate.context  # another one where the files have changed
        if now - self._looked_s >= _LOOK_S or context is not self._was:
            self._looked_s, self._was = now, context
            try:
                self._ends = certificate.ends_s(), None
            except (ssl.SSLError, OSError) as error:
                self._ends = 0.0, str(error)
        ends_s, fault = self._ends
        left_s = ends_s - self._clock.now_ms() / 1000
        if left_s > _WARNED_S:
            return []
        means = "clients that check it can't connect any more; who is connected goes on"
        then = "a new pair of files is taken at the next connection, without a restart"
        if left_s <= 0:
            return [Condition(EXPIRED, int(ends_s * 1000), fault or "its time is over", means, then)]
        text = f"in {left_s / _DAY_S:.1f} days"
        return [Condition(EXPIRES, 0, text, f"then {means}", then)]


def _since(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime(" since %Y-%m-%d %H:%M:%S UTC") if time_ms else ""
