"""Register in etcd, shared by any number of controllers, none of which has authoritative state of its own.

    <prefix>/sets/<name of the broker set>    the value, see broker_set

A write compares the revision and the bytes on which its decision was based.

Each controller remembers the last value that it read or wrote, for two purposes. Heartbeats are accepted without a
request to etcd, so that an outage of etcd makes no member dead. And lower epochs in etcd than before prove that it was
restored from a backup or wiped: `StoredSet.had` has the earlier value, and the set is frozen. A set that was removed
and created again is distinguished by its key, which was created after the remembered revision.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from controller.broker_set import BrokerSet, DamagedBrokerSet, decode, encode
from controller.controller_config import ControllerConfig
from controller.etcd_controllers import EtcdControllers
from controller.register import MAX_BROKER_SETS, NEVER, RegisterUnavailable, Revision, StoredSet
from infra.net.etcd import Etcd, EtcdAway, EtcdError, EtcdRefused, Header, KeyValue, parse_url
from infra.net.tls import client_context
from infra.process.startup import EXIT_CONFIG, StartupError

log = logging.getLogger(__name__)

MAX_KNOWN = 2 * MAX_BROKER_SETS  # includes sets that another controller has removed


def etcd_register(config: ControllerConfig) -> tuple[EtcdRegister, EtcdControllers]:
    """Return the register of `registerUrl` and its other controllers. Raises StartupError for invalid settings."""
    try:
        target = parse_url(config.register_url)
    except ValueError as error:
        raise StartupError(f"registerUrl={config.register_url}: {error}") from error
    certificate, key = config.etcd_tls_cert_path, config.etcd_tls_key_path
    if bool(certificate) != bool(key):
        raise StartupError("etcdTlsCertPath and etcdTlsKeyPath belong together: one is missing")
    tls = None
    if config.etcd_tls_enable:
        tls = client_context(config.etcd_tls_trust_cert_path)
        # etcd's certificates name its hosts. Without the check, any certificate of the same authority is accepted.
        tls.check_hostname = True
        if certificate:
            try:
                # An empty password makes an encrypted key an error instead of a prompt on the terminal.
                tls.load_cert_chain(Path(certificate).expanduser(), Path(key).expanduser(), password="")
            except OSError as error:
                raise StartupError(f"etcdTlsCertPath={certificate} with {key}: {error}") from error
    etcd, leases = (Etcd(target, tls=tls, user=config.etcd_user, password=config.etcd_password) for _ in range(2))
    return EtcdRegister(etcd, target.prefix), EtcdControllers(etcd, target.prefix, leases)


class _Known(NamedTuple):
    """The last known value of a set."""

    broker_set: BrokerSet
    revision: int
    cluster_id: int


class EtcdRegister:
    """Broker sets in one etcd cluster, under one prefix."""

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self._etcd, self._prefix = etcd, f"{prefix}/sets/".encode()
        self._known: dict[str, _Known] = {}

    async def open(self) -> None:
        """Check the access. Raises StartupError if etcd refuses; if it does not answer, later calls try again."""
        try:
            await self._etcd.read_all(self._prefix, 1, keys_only=True)
        except EtcdRefused as error:
            await self._etcd.close()
            raise StartupError(f"the register: {error}", EXIT_CONFIG) from error
        except EtcdAway as error:
            log.error("the register: %s; no decision until it answers", error)

    async def close(self) -> None:
        """Close the connections."""
        await self._etcd.close()

    @property
    def broken(self) -> str:
        return ""

    def glance(self, name: str) -> BrokerSet | None:
        known = self._known.get(name)
        return known.broker_set if known is not None else None

    async def get(self, name: str) -> StoredSet:
        before = self._known.get(name)
        try:
            read = await self._etcd.read(self._key(name))
        except EtcdError as error:
            raise RegisterUnavailable(None, str(error)) from error
        return self._stored(name, before, read.header, read.kvs[0] if read.kvs else None)

    async def all(self) -> dict[str, StoredSet | DamagedBrokerSet]:
        known = dict(self._known)
        try:
            read = await self._etcd.read_all(self._prefix, MAX_BROKER_SETS)
        except EtcdError as error:
            raise RegisterUnavailable(None, str(error)) from error
        found: dict[str, StoredSet | DamagedBrokerSet] = {}
        for kv in read.kvs:
            name = kv.key.removeprefix(self._prefix).decode(errors="replace")
            try:
                found[name] = self._stored(name, known.get(name), read.header, kv)
            except DamagedBrokerSet as error:
                found[name] = error
        if read.count <= len(read.kvs):  # the listing is complete: other known sets were removed or lost in a restore
            for name in known.keys() - found.keys():
                self._stored(name, known[name], read.header, None)
        return found

    def _stored(self, name: str, before: _Known | None, header: Header, held: KeyValue | None) -> StoredSet:
        """Compare the result of a read with the value that was known before the read began."""
        broker_set = _decoded(name, held) if held is not None else None
        had = _had(before, header, held)
        if held is None or broker_set is None:
            if had is None and self._known.get(name) is before:
                self._known.pop(name, None)
            return StoredSet(None, NEVER, had)
        if had is None or broker_set.epochs >= had.epochs:
            had = None
            if self._known.get(name) is before:  # else a write completed meanwhile and is newer
                self._remember(_Known(broker_set, held.mod_revision, header.cluster_id))
        return StoredSet(broker_set, Revision(held.mod_revision, held.value), had)

    async def put(self, broker_set: BrokerSet, expected: Revision) -> Revision | None:
        name, value = broker_set.name, encode(broker_set)
        try:
            if expected == NEVER:
                there = await self._etcd.read_all(self._prefix, 1, keys_only=True)
                if there.count >= MAX_BROKER_SETS:
                    raise RegisterUnavailable(None, f"the register is full: {there.count} broker sets")
            revision = await self._etcd.swap(self._key(name), self._seen(name, expected), value)
        except EtcdError as error:
            raise RegisterUnavailable(None, str(error)) from error
        if revision is None:
            return None
        known = self._known.get(name)
        if known is None or broker_set.epochs >= known.broker_set.epochs:
            self._remember(_Known(broker_set, revision, self._etcd.cluster_id))
        return Revision(revision, value)

    async def remove(self, name: str, expected: Revision) -> bool:
        try:
            revision = await self._etcd.swap(self._key(name), self._seen(name, expected), None)
        except EtcdError as error:
            raise RegisterUnavailable(None, str(error)) from error
        if revision is None:
            return False
        self._known.pop(name, None)
        return True

    def _remember(self, known: _Known) -> None:
        if known.broker_set.name in self._known or len(self._known) < MAX_KNOWN:
            self._known[known.broker_set.name] = known

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def _seen(self, name: str, expected: Revision) -> KeyValue | None:
        return KeyValue(self._key(name), expected.value, 0, expected.number) if expected != NEVER else None


def _had(before: _Known | None, header: Header, held: KeyValue | None) -> BrokerSet | None:
    """Return the value before this read if etcd was restored or wiped since; None if it was only changed or removed."""
    if before is None:
        return None
    # A removal, or one with a new creation, happened after the known write if the revisions are higher.
    since = held.create_revision > before.revision if held is not None else header.revision >= before.revision
    return None if since and header.cluster_id == before.cluster_id else before.broker_set


def _decoded(name: str, held: KeyValue) -> BrokerSet:
    broker_set = decode(held.value)
    if broker_set.name != name:
        raise DamagedBrokerSet(None, f"the value of {name!r} is of {broker_set.name!r}")
    return broker_set
