"""Checks of a broker.conf with `replication` before a start: its controllers, and the present members of the set.

Differences between members weaken the set's guarantees, so each is reported. Nothing is changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from access.guard import inner_credentials
from broker.config import BrokerConfig
from broker.ha.settings import SetSettings, settings_of
from infra.clock import Clock
from infra.config.properties import ConfigError, parse_properties, to_properties
from infra.net.tls import client_context
from neve.admin.broker_sets import BrokerSets, SetState, find_controller
from neve.admin.errors import Unreachable
from neve.admin.requests import new_pool
from neve.cli.checks import FAIL, OK, WARN, Check
from neve.client.net.connection import ConnectionPool
from neve.errors import NeveError

#: The resolution of one second, and the round trip.
_CLOCKS_APART_MS = 3_000

#: If they differ between members, one of them does not follow.
_MUST_BE_EQUAL = ("brokerClusterName", "mappedFileSizeCommitLog", "messageDelayLevel")
#: If they differ, the guarantees depend on which member is master.
_SHOULD_BE_EQUAL = ("replication", "minInSyncReplicas", "flushDiskType")


def checks(config: BrokerConfig, clock: Clock) -> Iterator[Check]:
    """Yield the checks of a broker that is to become a member."""
    try:
        settings = settings_of(config)
    except ConfigError as error:
        yield from (Check("broker set", FAIL, fault) for fault in error.faults)
        return
    if settings is not None:
        yield from asyncio.run(_SetDoctor(config, settings, clock).all())


class _SetDoctor:
    def __init__(self, config: BrokerConfig, settings: SetSettings, clock: Clock) -> None:
        self._config, self._settings, self._clock = config, settings, clock
        self._own = {key: value for _, key, value in parse_properties(to_properties(config), "own")}

    async def all(self) -> list[Check]:
        config = self._config
        tls = client_context(config.tls_trust_cert_path) if config.tls_enable else False
        pool = new_pool(inner_credentials(config), tls)
        try:
            return [*await self._controllers(pool), *await self._set(pool)]
        finally:
            await pool.close()

    async def _controllers(self, pool: ConnectionPool) -> list[Check]:
        addresses, found, answering = self._settings.controllers, list[Check](), 0
        for address in addresses:
            try:
                await find_controller(pool, address)
            except Unreachable as failure:
                found.append(Check("controller", WARN if len(addresses) > 1 else FAIL, f"{address}: {failure}"))
            else:
                answering += 1
                found.append(Check("controller", OK, address))
        if not answering and len(addresses) > 1:
            found.append(Check("controller", FAIL, "none answers: no master is elected"))
        if len(addresses) == 1:
            found.append(
                Check(
                    "controllers",
                    WARN,
                    "only one: while it is away, no master is elected and no member joins or leaves",
                )
            )
        return found

    async def _set(self, pool: ConnectionPool) -> list[Check]:
        name = self._config.broker_name
        try:
            sets = BrokerSets(pool, await find_controller(pool, ";".join(self._settings.controllers)))
            states = await sets.states([name])
        except NeveError as error:
            return [Check("broker set", FAIL, str(error))]
        if not states:
            return [Check("broker set", OK, f"{name} is unknown: this broker will be its first member")]
        (state,) = states
        return [*self._quorum(state), *self._hosts(state), *await self._members(sets, state)]

    def _quorum(self, state: SetState) -> Iterator[Check]:
        """Check the present in-sync replicas. If they are too few, nothing is acknowledged."""
        least = self._settings.rules.confirm.min_in_sync
        living = sum(one.in_sync and one.alive for one in state.replicas)
        text = f"{living} of {len(state.replicas)} members live and are in sync"
        if state.living_master is None:
            yield Check("broker set", FAIL, f"{state.name} has no living master; {text}")
        elif living < least:
            yield Check("broker set", FAIL, f"{text}, {least} are needed: nothing is acknowledged")
        elif living == least > 1:
            yield Check("broker set", WARN, f"{text}, as many as are needed: no other member may fail")
        else:
            yield Check("broker set", OK, f"{text}; {state.master} is master")

    def _hosts(self, state: SetState) -> Iterator[Check]:
        """Check for members on one machine. This broker counts as a member, even before it is one."""
        config, addresses = self._config, {one.address for one in state.replicas}
        if config.broker_ip1:
            addresses.add(f"{config.broker_ip1}:{config.listen_port}")
        hosts = {address.rpartition(":")[0] for address in addresses}
        if len(hosts) == 1 and len(addresses) > 1:
            yield Check("machines", WARN, f"all members are on {min(hosts)}: they fail together")

    async def _members(self, sets: BrokerSets, state: SetState) -> list[Check]:
        found = list[Check]()
        for one in state.replicas:
            what = f"member {one.id}"
            try:
                theirs = await sets.config(one.address)
                clock_ms = await sets.clock_ms(one.address)
            except NeveError as error:
                found.append(Check(what, WARN, f"{one.address}: {error}"))
                continue
            differing = [
                Check(
                    what,
                    FAIL if key in _MUST_BE_EQUAL else WARN,
                    f"{key} is {theirs[key]} there, {self._own[key]} here",
                )
                for key in (*_MUST_BE_EQUAL, *_SHOULD_BE_EQUAL)
                if key in theirs and theirs[key] != self._own[key]
            ]
            apart_ms = abs(clock_ms - self._clock.now_ms()) if clock_ms is not None else 0
            if apart_ms > _CLOCKS_APART_MS:
                differing.append(Check(what, WARN, f"its clock and this machine's are {apart_ms / 1000:.0f} s apart"))
            found += differing or [Check(what, OK, f"{one.address}: fits")]
        return found
