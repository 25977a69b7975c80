"""Settings of a broker set: unsafe combinations of keys are refused, accepted ones have their documented effect."""

from __future__ import annotations

import pytest

from broker.config import BrokerConfig
from broker.ha.confirm import ReplicationMode
from broker.ha.settings import SetSettings, settings_of
from infra.config.properties import ConfigError, load


def settings(*lines: str) -> SetSettings | None:
    return settings_of(load(BrokerConfig, None, lines))


def of_set(*lines: str) -> SetSettings:
    found = settings("controllerAddr=c:9878", *lines)
    assert found is not None
    return found


def test_broker_without_replication_keys_has_no_set() -> None:
    assert settings() is None
    assert settings("brokerRole=ASYNC_MASTER", "inSyncReplicas=1", "minInSyncReplicas=1") is None


@pytest.mark.parametrize(("mode", "least"), [("sync", 2), ("sync-available", 1), ("async", 1)])
def test_each_mode_has_its_minimum_of_in_sync_replicas(mode: str, least: int) -> None:
    found = of_set(f"replication={mode}")
    assert found.rules.confirm.replication is ReplicationMode(mode)
    assert found.rules.confirm.min_in_sync == least


def test_minimum_above_two_in_sync_replicas_is_accepted() -> None:
    assert of_set("replication=sync", "minInSyncReplicas=3", "inSyncReplicas=3").rules.confirm.min_in_sync == 3


def test_acknowledging_from_memory_follows_the_flush_mode() -> None:
    assert of_set("replication=sync").rules.acknowledges_from_memory
    assert not of_set("replication=sync", "flushDiskType=SYNC_FLUSH").rules.acknowledges_from_memory


@pytest.mark.parametrize("mode", ["sync", "sync-available"])
def test_apache_controller_requires_sync_flush_if_slaves_are_waited_for(mode: str) -> None:
    """It does not distinguish two incarnations of a broker, whatever a power cut took from the first one."""
    assert "flushDiskType=SYNC_FLUSH" in of_set(f"replication={mode}").stock_is_refused
    assert of_set(f"replication={mode}", "flushDiskType=SYNC_FLUSH").stock_is_refused == ""


def test_apache_controller_is_accepted_with_async_replication() -> None:
    assert of_set("replication=async").stock_is_refused == ""


def test_controller_addresses_are_separated_by_semicolon_or_comma() -> None:
    assert settings("replication=sync", "controllerAddr=a:1; b:2,c:3") is not None
    found = settings("replication=sync", "controllerAddr=a:1; b:2,c:3")
    assert found is not None
    assert found.controllers == ("a:1", "b:2", "c:3")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (("replication=sync",), "without controllerAddr"),
        (("replication=sync", "controllerAddr=here"), "not host:port"),
        (("apacheMembers=true",), "nothing is replicated"),
        (("brokerSetExists=true",), "nothing is replicated"),
        (("replication=sync", "controllerAddr=c:9878", "apacheMembers=true", "storeUrl=dir:/tmp/a"), "archived"),
        (("replication=sync", "controllerAddr=c:9878", "apacheMembers=true", "tlsServerMode=enforcing"), "without TLS"),
        (
            ("replication=sync", "controllerAddr=c:9878", "apacheMembers=true", "authenticationEnabled=true"),
            "without authentication",
        ),
        (("controllerAddr=c:9878",), "nothing is replicated"),
        (("replication=async", "controllerAddr=c:9878", "allAckInSyncStateSet=true"), "waits for no slave"),
        (("replication=async", "controllerAddr=c:9878", "brokerRole=SYNC_MASTER"), "waits for no slave"),
        (("replication=async", "controllerAddr=c:9878", "minInSyncReplicas=2"), "only replication=sync enforces"),
        (
            ("replication=sync-available", "controllerAddr=c:9878", "minInSyncReplicas=2"),
            "only replication=sync enforces",
        ),
        (
            ("replication=sync", "controllerAddr=c:9878", "controllerHeartBeatTimeoutMills=1500ms"),
            "late heartbeat would count as dead",
        ),
        (
            ("replication=sync", "controllerAddr=c:9878", "authenticationEnabled=true"),
            "innerClientAuthenticationCredentials",
        ),
        (("replication=sync", "controllerAddr=c:9878", "authenticationEnabled=true"), "tlsServerMode=enforcing"),
        (
            ("replication=sync", "controllerAddr=c:9878", "minInSyncReplicas=3", "inSyncReplicas=2"),
            "waits for all in-sync replicas",
        ),
    ],
)
def test_unsafe_combination_of_keys_is_refused(lines: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        settings(*lines)
