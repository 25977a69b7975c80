"""Administration: the broker's configuration (25, 26), and requests for work that neve does by itself."""

import logging

from access.permissions import GET, UPDATE, of_cluster
from broker.config import BrokerConfig
from broker.kept_config import KeptConfig
from broker.requests.route import ANY_ROLE, BrokerRoute, Waits
from broker.tables.topic_config_manager import TopicConfigManager
from infra.config.properties import ConfigError, live_keys, parse_properties, to_properties
from infra.net.remoting_server import Connection
from infra.observe import log as logs
from neve.errors import BrokerError
from neve.remoting.body import dumps_standard
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand

log = logging.getLogger(__name__)


class AdminConfigProcessor:
    """Returns and changes the configuration (a part of RocketMQ's AdminBrokerProcessor)."""

    def __init__(self, config: BrokerConfig, kept: KeptConfig, topics: TopicConfigManager) -> None:
        self._config, self._kept, self._topics = config, kept, topics

    @BrokerRoute(Code.GET_BROKER_CONFIG, of_cluster(GET), ANY_ROLE, Waits.NO, reads=True, hides_topics=False)
    def broker_config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return the effective configuration (26), with the keys changed at runtime and their configured values."""
        version = dumps_standard(self._topics.data_version.to_wire()).decode()
        body = to_properties(self._config).encode()
        ext = {"version": version, "kept": dumps_standard(self._kept.instead_of()).decode()}
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext=ext, body=body)

    @BrokerRoute(Code.UPDATE_BROKER_CONFIG, of_cluster(UPDATE), ANY_ROLE, Waits.NO, reads=False, hides_topics=False)
    async def update_config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Change keys at runtime (25); the changes persist across restarts.

        Other keys are rejected, because they need a restart or are security relevant. `unset` lists keys, separated by
        commas, that are set back to their configured values.
        """
        unset = [key for key in request.ext.get("unset", "").split(",") if key]
        try:
            text = bytes(request.body).decode()
            changes = {name: value for _, name, value in parse_properties(text, "request")}
        except (UnicodeDecodeError, ConfigError) as error:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"properties text expected: {error}") from error
        refused = sorted(set(changes) - set(live_keys(self._config)))
        if refused:
            raise BrokerError(
                ResponseCode.NO_PERMISSION,
                f"Can not update config in black list: {', '.join(refused)}: restart the broker to change "
                f"{'it' if len(refused) == 1 else 'them'}; nothing was changed",
            )
        try:
            await self._kept.change(changes, unset)
        except ConfigError as error:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        except OSError as error:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"not changed, because it can't be saved: {error}") from error
        if "logLevel" in {*changes, *unset}:
            logs.set_level(self._config.log_level)
        changed = [*(f"{key}={value}" for key, value in changes.items()), *(f"{key} as it was given" for key in unset)]
        log.info("changed by %s:%d: %s", *connection.remote, ", ".join(changed))
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    @BrokerRoute(
        Code.CLEAN_EXPIRED_CONSUMEQUEUE, of_cluster(UPDATE), ANY_ROLE, Waits.NO, reads=False, hides_topics=False
    )
    @BrokerRoute(Code.CLEAN_UNUSED_TOPIC, of_cluster(UPDATE), ANY_ROLE, Waits.NO, reads=False, hides_topics=False)
    @BrokerRoute(Code.DELETE_EXPIRED_COMMITLOG, of_cluster(UPDATE), ANY_ROLE, Waits.NO, reads=False, hides_topics=False)
    @BrokerRoute(Code.POP_ROLLBACK, of_cluster(UPDATE), ANY_ROLE, Waits.NO, reads=False, hides_topics=False)
    def nothing_to_do(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Accept requests for work that neve does by itself; the state of pops is always in the log."""
        return RemotingCommand.response(request, ResponseCode.SUCCESS)
