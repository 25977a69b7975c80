"""Administration: the broker's configuration (25, 26), and what is asked for and happens by itself."""

from broker.config import BrokerConfig
from broker.tables.topic_config_manager import TopicConfigManager
from infra.config import ConfigError, live_keys, parse_properties, to_properties, update_live
from infra.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import dumps_standard
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand


class AdminConfigProcessor:
    """Tells and changes the configuration (a part of RocketMQ's AdminBrokerProcessor)."""

    def __init__(self, config: BrokerConfig, topics: TopicConfigManager) -> None:
        self._config, self._topics = config, topics

    def broker_config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        version = dumps_standard(self._topics.data_version.to_wire()).decode()
        body = to_properties(self._config).encode()
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext={"version": version}, body=body)

    def update_config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """25: only keys that are meant for it; everything else would need a restart or open a hole."""
        try:
            text = bytes(request.body).decode()
            changes = {name: value for _, name, value in parse_properties(text, "request")}
        except (UnicodeDecodeError, ConfigError) as error:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"properties text expected: {error}") from error
        refused = sorted(set(changes) - set(live_keys(self._config)))
        if refused:
            raise BrokerError(ResponseCode.NO_PERMISSION, f"Can not update config in black list: {', '.join(refused)}")
        try:
            update_live(self._config, changes)
        except ConfigError as error:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    @staticmethod
    def nothing_to_do(connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """306, 316, 329: what they ask for happens by itself."""
        return RemotingCommand.response(request, ResponseCode.SUCCESS)
