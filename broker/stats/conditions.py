"""Conditions: functions that a running broker can't provide now, with start, cause, consequences and recovery.

All of these report the same state: `/readyz`, `/archive/status`, `neve_condition`, the runtime information (request 28,
which `neve broker show` and `mqadmin brokerStatus` print). The log has one line when a condition begins
and one when it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from broker.archiving.archive import AnyArchive
from broker.clients.broker_outer_api import BrokerOuterApi
from broker.ha.member_status import faults
from broker.ha.plain_slave import PlainSlave
from broker.ha.replicas_manager import ReplicasManager
from broker.life import BrokerLife
from infra.clock import Clock
from infra.net.tls import Certificate
from infra.objects.store import ObjectStoreError
from infra.observe.conditions import EXPIRED, EXPIRES, CertificateConditions, Condition, ConditionLog

log = logging.getLogger(__name__)

# A job with small requests to the store that runs for longer than this (s) waits for an unresponsive store.
_HANGING_S = 120.0
_SHORT_JOBS = ("state", "checkpoint", "ttl")
# Frequent jobs, whose last result is current. The result of the last sweep may be hours old.
_FREQUENT_JOBS = (*_SHORT_JOBS, "offload", "retention")

_DISK, _NAMES, _STORE = "disk full", "name servers unreachable", "archive unreachable"
_FENCED, _DIVERGED, _CLOCK = "archive fenced", "archive diverged", "clock not trusted"
_MASTER, _SET = "master not followed", "broker set"
#: All names; the conditions of a broker set share one.
NAMES = (_DISK, _NAMES, _STORE, _FENCED, _DIVERGED, _CLOCK, _MASTER, _SET, EXPIRED, EXPIRES)


class Conditions:
    """Conditions of one broker with an attached archive. Called on the event loop."""

    def __init__(
        self,
        clock: Clock,
        life: BrokerLife,
        archive: Callable[[], AnyArchive],
        *,
        name_servers: BrokerOuterApi,
        replicas: ReplicasManager | None = None,
        plain_slave: PlainSlave | None = None,
        certificate: Certificate | None = None,
    ) -> None:
        """Create it; `archive` returns the opened archive, `certificate` is the one that clients verify."""
        self._clock, self._life, self._archive, self._replicas = clock, life, archive, replicas
        self._name_servers, self._plain_slave = name_servers, plain_slave
        self._boot_ms = clock.now_ms()
        self._condition_log, self._ends = ConditionLog(clock, log), CertificateConditions(clock, certificate)

    def look(self) -> None:
        """Log conditions that begin or end. Called every second."""
        self._condition_log.look(self._found())

    def now(self) -> list[Condition]:
        """Return the current conditions; empty if all is well."""
        return self._condition_log.dated(self._found())

    def metric(self) -> Mapping[str, int]:
        """Return 1 for each condition that holds and 0 for the others, by name."""
        there = {_kind(one) for one in self.now()}
        return {name: int(name in there) for name in NAMES}

    def _found(self) -> list[Condition]:
        found = list[Condition]()
        if (why := self._life.refusal) is not None:
            since = self._ago(self._clock.monotonic() - self._life.refused_since)
            means = "sends are refused with code 14; reads, acks and archiving continue"
            then = "eviction frees archived segments; below the mark, sends are accepted again"
            found.append(Condition(_DISK, since, why, means, then))
        found += [*self._of_name_servers(), *self._of_set(), *self._of_archive()]
        clock = self._archive().safe_clock
        if not (state := clock.state()).trusted:
            means = f"expiry is {state.behind_ms // 1000} s late"
            then = "it ends when the store's clock agrees, or with `neve archive confirm-clock`; nothing expires early"
            found.append(Condition(_CLOCK, state.since_ms, state.why, means, then))
        return [*found, *self._ends.now()]

    def _of_name_servers(self) -> list[Condition]:
        away = self._name_servers.unanswered
        if not away:
            return []
        why = "; ".join(f"{server}: {reason}" for server, reason in sorted(away.items()))
        is_alone = not self._name_servers.registered
        means = (
            "clients that know this broker continue to use it, others find no route to it"
            if is_alone
            else "clients of these name servers find no route to this broker, or an old one; other clients continue"
        )
        return [Condition(_NAMES, 0, why, means, "the broker registers again within 30 s of their return")]

    def _of_set(self) -> list[Condition]:
        found = list[Condition]()
        if self._replicas is not None:
            then = "it recovers when the cause is gone; docs/ha/overview.md lists the causes"
            found += [Condition(*fault, then) for fault in faults(self._replicas)]
        if self._plain_slave is not None and (fault := self._plain_slave.client.trouble) is not None:
            means = "stored messages are served; the master's log is not copied, and nothing is archived"
            found.append(Condition(_MASTER, 0, fault.text, means, "the broker retries every few seconds"))
        return found

    def _of_archive(self) -> list[Condition]:
        archive = self._archive()
        if archive.journal is not None and archive.journal.ownership.fenced:
            means = "nothing is archived, deleted or evicted here; hot messages are served"
            then = "none: stop one of the two processes"
            return [Condition(_FENCED, 0, "another process has taken the archive over", means, then)]
        if (divergence := archive.divergence) is not None:
            means = "nothing is archived or expired, or evicted from that offset on; all local messages are served"
            then = "none: docs/migrate/archive.md describes what to do"
            return [Condition(_DIVERGED, divergence.since_ms, divergence.text, means, then)]
        if (away := self.store_away()) is not None:
            means = "messages that are not on the local disk can't be read; nothing is archived, evicted or expired"
            then = "the local log grows; when the store answers, unarchived messages are archived, oldest first"
            return [Condition(_STORE, *away, means, then)]
        return []

    def store_away(self) -> tuple[int, str] | None:
        """Return since when (ms) the archive's store has been unreachable, and why; None if it is reachable.

        The results of frequent jobs decide.
        """
        archive = self._archive()
        if archive.journal is None:
            return None
        failing_jobs = archive.jobs.failing()
        failing = [
            failing_jobs[name]
            for name in _FREQUENT_JOBS
            if name in failing_jobs and issubclass(failing_jobs[name].kind, ObjectStoreError)
        ]
        if failing:
            first = min(failing, key=lambda one: one.since_ms)
            return first.since_ms, first.error
        running = archive.jobs.running()
        silent = max((running.get(name, 0.0) for name in _SHORT_JOBS), default=0.0)
        if silent > _HANGING_S:
            return self._ago(silent), "the store does not answer"
        if archive.journal.ownership.leads and not archive.journal.ownership.online:
            return self._boot_ms, "the store has not answered since the start"
        return None

    def _ago(self, seconds: float) -> int:
        return self._clock.now_ms() - int(seconds * 1000)


def _kind(condition: Condition) -> str:
    """Return the condition's name in `NAMES`."""
    return _SET if condition.name.startswith(_SET) else condition.name
