"""Settings of a broker set, derived from the configuration. Combinations that only look safe are refused. Pure.

`replication` alone decides what an acknowledgement promises (`confirm`). RocketMQ's keys for it have to agree if a file
contains them. An operator who sets `inSyncReplicas=2` expects two copies of each message, and gets an error otherwise.
"""

from __future__ import annotations

import re

import msgspec

from broker.config import BrokerConfig
from broker.ha.confirm import ConfirmRules, ReplicationMode
from broker.ha.member_rules import MemberRules
from infra.config.properties import ConfigError
from neve.remoting.address import parse_address


class SetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a broker that is a member of a set."""

    rules: MemberRules
    controllers: tuple[str, ...]
    stock_is_refused: str = ""  # reason why Apache's controller must not elect this member; empty: it may


def settings_of(config: BrokerConfig) -> SetSettings | None:
    """Return the settings; None: this broker is in no set. Raise ConfigError with all faults.

    A broker without a set is a single master, or the slave of an Apache master.
    """
    replication = ReplicationMode(config.replication)
    if replication is ReplicationMode.NONE:
        _check_slave(config) if is_slave(config) else _check_alone(config)
        return None
    controllers = tuple(part.strip() for part in re.split(r"[;,]", config.controller_addr) if part.strip())
    least = max(config.min_in_sync_replicas, 2 if replication is ReplicationMode.SYNC else 1)
    faults = [*_faults_of_addresses(controllers), *_faults_of_mode(config, replication, least)]
    faults += [*_faults_of_users(config), *_faults_of_mixing(config)]
    if config.broker_id:
        faults.append(f"brokerId={config.broker_id} with replication: a controller assigns the ids")
    if config.broker_role == "SLAVE":
        faults.append("brokerRole=SLAVE with replication: a controller assigns the roles")
    beat, silence = config.broker_heartbeat_interval, config.controller_heart_beat_timeout_mills
    if 2 * beat > silence:
        faults.append(
            f"brokerHeartbeatInterval={beat}ms with controllerHeartBeatTimeoutMills={silence}ms: "
            "a master with one late heartbeat would count as dead; the timeout must be at least twice the interval"
        )
    if faults:
        raise ConfigError(*faults)
    seconds = config.ha_max_time_slave_not_catchup / 1000
    rules = ConfirmRules(
        replication,
        min_in_sync=least,
        shrink_after=seconds,
        isolated_after=config.controller_heart_beat_timeout_mills / 1000,
    )
    return SetSettings(
        rules=MemberRules(
            confirm=rules,
            acknowledges_from_memory=not config.sync_flush,
            heartbeat_every=config.broker_heartbeat_interval / 1000,
            set_exists=config.broker_set_exists,
        ),
        controllers=controllers,
        stock_is_refused=_why_not_stock(config, rules),
    )


def _why_not_stock(config: BrokerConfig, rules: ConfirmRules) -> str:
    """Return why Apache's controllers must not elect this member; empty: they may.

    They elect any live member that is in sync, even if it has lost bytes since.
    """
    if config.sync_flush or not rules.waits:
        return ""
    return (
        f"with it replication={rules.replication.value} needs flushDiskType=SYNC_FLUSH, as it does not notice that a "
        "broker has lost acknowledged messages in a power cut"
    )


def is_slave(config: BrokerConfig) -> bool:
    """Return whether this broker follows an Apache master without a controller."""
    return config.replication == ReplicationMode.NONE.value and config.broker_role == "SLAVE"


def _check_slave(config: BrokerConfig) -> None:
    faults = [*_faults_of_copies(config, "a slave of a master without a controller has no replication settings")]
    if config.broker_id == 0:
        faults.append("brokerRole=SLAVE with brokerId=0: 0 is the id of the master")
    if not config.name_servers:
        faults.append("brokerRole=SLAVE without namesrvAddr: a slave gets its master's address from the name servers")
    if faults:
        raise ConfigError(*faults)


def _check_alone(config: BrokerConfig) -> None:
    why = "nothing is replicated with replication=none"
    faults = [*_faults_of_copies(config, why)]
    if config.broker_role != "ASYNC_MASTER":
        faults.append(f"brokerRole={config.broker_role}: {why}")
    if config.broker_id:
        faults.append(f"brokerId={config.broker_id}: a master has id 0, and a controller assigns the other ids")
    if faults:
        raise ConfigError(*faults)


def _faults_of_copies(config: BrokerConfig, why: str) -> list[str]:
    """Return a fault for each setting that requests replication, which this broker does not have."""
    asked = {
        f"controllerAddr={config.controller_addr}": bool(config.controller_addr),
        f"inSyncReplicas={config.in_sync_replicas}": config.in_sync_replicas > 1,
        f"minInSyncReplicas={config.min_in_sync_replicas}": config.min_in_sync_replicas > 1,
        "allAckInSyncStateSet=true": config.all_ack_in_sync_state_set,
        "apacheMembers=true": config.apache_members,
        "brokerSetExists=true": config.broker_set_exists,
    }
    return [f"{key}: {why}" for key, is_asked in asked.items() if is_asked]


def _faults_of_addresses(controllers: tuple[str, ...]) -> list[str]:
    if not controllers:
        return ["replication without controllerAddr: a controller elects the set's master"]
    faults = list[str]()
    for address in controllers:
        try:
            parse_address(address)
        except ValueError as error:
            faults.append(f"controllerAddr: {error}")
    return faults


def _faults_of_users(config: BrokerConfig) -> list[str]:
    """Return the faults of authentication.

    Members have to authenticate as well, because the log has data that users may not read.
    """
    if not config.authentication_enabled:
        return []
    faults = list[str]()
    if not config.inner_client_authentication_credentials:
        faults.append(
            "authenticationEnabled with replication: set innerClientAuthenticationCredentials, equal on all members"
        )
    if config.tls_server_mode != "enforcing" or not config.tls_enable:
        faults.append("authenticationEnabled with replication: set tlsServerMode=enforcing and tlsEnable=true")
    return faults


def _faults_of_mixing(config: BrokerConfig) -> list[str]:
    """Return the faults of mixing with Apache's brokers: settings that need features that those lack."""
    if not config.apache_members:
        return []
    asked = {
        "authenticationEnabled=true: Apache's brokers replicate without authentication": (
            config.authentication_enabled
        ),
        "tlsServerMode=enforcing: Apache's brokers replicate without TLS": config.tls_server_mode == "enforcing",
        "storeUrl: Apache's brokers do not report their flushed offset, so nothing could be archived": (
            bool(config.store_url)
        ),
    }
    return [f"apacheMembers with {what}" for what, is_asked in asked.items() if is_asked]


def _faults_of_mode(config: BrokerConfig, replication: ReplicationMode, least: int) -> list[str]:
    mode, waits = replication.value, replication in (ReplicationMode.SYNC, ReplicationMode.SYNC_AVAILABLE)
    faults = list[str]()
    if replication is not ReplicationMode.SYNC and least > 1:
        faults.append(f"replication={mode} with minInSyncReplicas={least}: only replication=sync enforces it")
    if not waits and config.all_ack_in_sync_state_set:
        faults.append(f"allAckInSyncStateSet=true with replication={mode}, which waits for no slave: use sync")
    if not waits and config.broker_role == "SYNC_MASTER":
        faults.append(f"brokerRole=SYNC_MASTER with replication={mode}, which waits for no slave: use sync")
    if config.in_sync_replicas > 1 and config.in_sync_replicas != least:
        faults.append(
            f"inSyncReplicas={config.in_sync_replicas} with replication={mode}: an acknowledgement waits for all "
            "in-sync replicas, or for none; minInSyncReplicas is their minimum"
        )
    return faults
