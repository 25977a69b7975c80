"""What a broker that serves can't do now: since when, why, and what that means to those who use it."""

from __future__ import annotations

from typing import NamedTuple

from broker.archiving.archive import AnyArchive
from broker.ha.plain_slave import PlainSlave
from broker.ha.replicas_manager import ReplicasManager
from broker.life import BrokerLife
from infra.clock import Clock
from infra.object_store.protocol import ObjectStoreError

# A job that asks the store for little and takes longer than this waits for an answer that does not come.
_HANGING_S = 120.0
_SHORT_JOBS = ("state", "checkpoint", "ttl")
# Those that come again soon: what they heard last is how it is. A sweep's last word may be hours old.
_FREQUENT_JOBS = (*_SHORT_JOBS, "offload", "retention")


class Condition(NamedTuple):
    """One thing that the broker can't do now: since when (ms), why, and what it means for its users."""

    name: str
    since_ms: int
    why: str
    means: str


class Conditions:
    """Of one broker, once its archive is settled."""

    def __init__(
        self,
        clock: Clock,
        life: BrokerLife,
        archive: AnyArchive,
        replicas: ReplicasManager | None = None,
        plain_slave: PlainSlave | None = None,
    ) -> None:
        self._clock, self._life, self._archive, self._replicas = clock, life, archive, replicas
        self._plain_slave = plain_slave
        self._boot_ms = clock.now_ms()

    def now(self) -> list[Condition]:
        """None: all is well."""
        archive = self._archive
        found = []
        if (why := self._life.refusal) is not None:
            since = self._ago(self._clock.monotonic() - self._life.refused_since)
            means = "sends are refused with code 14; reads, acks and archiving go on"
            found.append(Condition("disk full", since, why, means))
        if self._replicas is not None:
            found += [Condition(*trouble) for trouble in self._replicas.troubles()]
        if self._plain_slave is not None and (fault := self._plain_slave.client.trouble) is not None:
            means = "what is here is served, and the master's log is not copied on; nothing is archived"
            found.append(Condition("master not followed", 0, fault.text, means))
        if archive.journal is not None and archive.journal.fenced:
            means = "nothing is archived, deleted or evicted here; hot messages are served"
            found.append(Condition("archive fenced", 0, "another process has taken it over", means))
        elif (overtaken := archive.overtaken) is not None:
            means = "nothing is archived or expired any more, nor evicted from there on; all that is here is served"
            found.append(Condition("archive overtaken", overtaken.since_ms, overtaken.text, means))
        elif (away := self.store_away()) is not None:
            means = "messages that are not on the local disk can't be read; nothing is archived, evicted or expired"
            found.append(Condition("archive unreachable", *away, means))
        clock = archive.safe_clock
        if not (state := clock.state()).trusted:
            means = f"what expires is {state.behind_ms // 1000} s late, until `neve archive confirm-clock`"
            found.append(Condition("clock not trusted", state.since_ms, state.why, means))
        return found

    def store_away(self) -> tuple[int, str] | None:
        """Since when the archive's store has not answered, by the jobs that ask it all the time; what they heard."""
        archive = self._archive
        if archive.journal is None:
            return None
        told = archive.jobs.failing()
        failing = [
            told[name] for name in _FREQUENT_JOBS if name in told and issubclass(told[name].kind, ObjectStoreError)
        ]
        if failing:
            first = min(failing, key=lambda one: one.since_ms)
            return first.since_ms, first.error
        running = archive.jobs.running()
        silent = max((running.get(name, 0.0) for name in _SHORT_JOBS), default=0.0)
        if silent > _HANGING_S:
            return self._ago(silent), "the store does not answer"
        if archive.journal.leads and not archive.journal.online:
            return self._boot_ms, "the store has not answered since the start"
        return None

    def _ago(self, seconds: float) -> int:
        return self._clock.now_ms() - int(seconds * 1000)
