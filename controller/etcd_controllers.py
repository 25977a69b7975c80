"""Exchange of liveness between controllers in the etcd of their register.

    <prefix>/alive/<name of the broker set>/<controller>    JSON: {"<broker id>": {fields of its heartbeat}, ...}

The name is percent-encoded. Each key is attached to its controller's lease and is deleted with it. A key is not written
for each heartbeat, but when a member becomes alive or dead or its report changes.

Reads are linearizable. If two controllers both lose a broker, the one that publishes later reads that the other has
lost it, too. So at least one of them finds that no controller hears the broker.

Writes are compare-and-swap although each controller has its own keys, because an abandoned write may arrive late.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Mapping
from urllib.parse import quote

import msgspec

from controller.decision import LOWEST_PRIORITY, UNKNOWN, Report
from controller.other_controllers import Heard
from controller.register import RegisterUnavailable
from infra.net.etcd import Etcd, EtcdError, EtcdRefused, KeyValue
from neve.entropy import system_entropy, unique_name

log = logging.getLogger(__name__)

LEASE_S = 3  # how long the reports of a dead controller remain valid
RENEW_S = 0.4  # together with the longest wait for an answer of etcd it is less than the lease
_MOST_CONTROLLERS = 64
_MOST_TRIES = 4


class _Publication(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A report without its time: a key that exists is current. Unknown fields of other versions are ignored."""

    timeout_ms: int
    address: str = ""
    cluster: str = ""
    epoch: int = UNKNOWN
    max_offset: int = UNKNOWN
    priority: int = LOWEST_PRIORITY
    incarnation: str = ""
    starts: int = 0
    process: str = ""
    master_epoch: int = UNKNOWN
    sync_state_set_epoch: int = UNKNOWN


class EtcdControllers:
    """The exchange in the register's etcd. `_written` has the last known values of this controller's keys."""

    renew_s = RENEW_S

    def __init__(self, etcd: Etcd, prefix: str, leases: Etcd) -> None:
        """`leases` is a separate client for the lease and is closed here: other requests must not delay a renewal."""
        self._etcd, self._prefix, self._leases = etcd, f"{prefix}/alive/", leases
        self._own_id = unique_name(system_entropy)
        self._lease = 0
        self._written: dict[str, KeyValue | None] = {}
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def reports_of(self, name: str) -> Heard:
        prefix = self._set_prefix(name)
        try:
            read = await self._etcd.read_all(prefix, _MOST_CONTROLLERS)
        except EtcdError as error:
            raise RegisterUnavailable(None, str(error)) from error
        own = next((kv for kv in read.kvs if kv.key == self._key(name)), None)
        if _revision(own) != _revision(self._written.get(name, own)):
            del self._written[name]  # the key has changed, so the next `publish` reads and writes it again
        found: dict[int, list[Report]] = {}
        for kv in read.kvs:
            if kv is own:
                continue
            for broker_id, report in _decoded(kv).items():
                found.setdefault(broker_id, []).append(report)
        return found

    async def publish(self, name: str, living: Mapping[int, Report]) -> None:
        turn = self._turns.setdefault(name, asyncio.Lock())
        async with turn:
            try:
                await self._publish(name, _encoded(living) if living else None)
            except EtcdError as error:
                raise RegisterUnavailable(None, str(error)) from error

    async def renew(self) -> None:
        try:
            if not self._lease or not await self._leases.keep_alive(self._lease):
                self._lease = await self._leases.grant(LEASE_S)
                self._written.clear()
        except EtcdError as error:
            raise RegisterUnavailable(None, str(error)) from error

    async def close(self) -> None:
        if self._lease:
            try:
                await self._leases.revoke(self._lease)
            except EtcdError as error:
                log.warning("the reported live brokers remain for %d s: %s", LEASE_S, error)
        await self._leases.close()

    async def _publish(self, name: str, value: bytes | None) -> None:
        """Write the key until it has the value, whatever the outcome of earlier writes."""
        key = self._key(name)
        for _ in range(_MOST_TRIES):
            if name not in self._written:
                read = await self._etcd.read(key)
                self._written[name] = read.kvs[0] if read.kvs else None
            seen = self._written[name]
            if (seen.value if seen is not None else None) == value and (seen is None or seen.lease == self._lease):
                return
            if value is not None and not self._lease:
                return  # there is no lease yet; the periodic `publish` after the first renewal writes it
            del self._written[name]
            lease = self._lease
            revision = await self._etcd.swap(key, seen, value, lease=lease)
            if revision is not None:
                self._written[name] = KeyValue(key, value, 0, revision, lease) if value is not None else None
                return
        raise EtcdRefused(f"{key!r} is written by other controllers all the time")

    def _set_prefix(self, name: str) -> bytes:
        return f"{self._prefix}{quote(name, safe='')}/".encode()

    def _key(self, name: str) -> bytes:
        return self._set_prefix(name) + self._own_id.encode()


def _revision(kv: KeyValue | None) -> int:
    return kv.mod_revision if kv is not None else 0


def _encoded(living: Mapping[int, Report]) -> bytes:
    publications = {
        str(broker_id): _Publication(
            timeout_ms=report.timeout_ms,
            address=report.address,
            cluster=report.cluster,
            epoch=report.epoch,
            max_offset=min(report.max_offset, 1),  # only empty or not: elections ask the broker for its log end
            priority=report.priority,
            incarnation=report.incarnation,
            starts=report.starts,
            process=report.process,
            master_epoch=report.master_epoch,
            sync_state_set_epoch=report.sync_state_set_epoch,
        )
        for broker_id, report in sorted(living.items())
    }
    return msgspec.json.encode(publications)


def _decoded(kv: KeyValue) -> dict[int, Report]:
    try:
        publications = msgspec.json.decode(kv.value, type=dict[int, _Publication])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # The key may contain a member that only its controller hears, so no decision is possible without it.
        raise RegisterUnavailable(None, f"{kv.key!r} in etcd can't be read: {error}") from error
    return {
        broker_id: Report(0, **{field: getattr(one, field) for field in _Publication.__struct_fields__})
        for broker_id, one in publications.items()
    }
