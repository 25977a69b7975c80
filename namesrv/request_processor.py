"""The requests of a name server."""

from __future__ import annotations

import logging
from typing import NamedTuple

from access.permissions import DELETE, GET, LIST, UPDATE, of_cluster, of_route, of_topic
from access.route import Route, routes_of
from infra.config.properties import ConfigError, parse_properties, to_properties, update_live
from infra.net.remoting_server import Connection
from infra.observe import log as logs
from namesrv.kv_config_manager import ORDER_TOPIC_CONFIG, KvConfigManager
from namesrv.namesrv_config import NamesrvConfig
from namesrv.registration import BrokerRegistration, check_crc, parse_registration
from namesrv.route_info_manager import FLAG_UNIT, FLAG_UNIT_SUB, MAX_NAME, BrokerIdentity, RouteInfoManager
from neve.errors import BrokerError
from neve.remoting.body import DataVersion, TopicRouteData, dumps, dumps_object_keys, dumps_standard, loads_as
from neve.remoting.codes import VERSION_STANDARD_JSON_ROUTE, ResponseCode
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import optional_bool, optional_int, require_int, require_str

log = logging.getLogger(__name__)

_REGISTERED = "registered"


class _Registered(NamedTuple):
    """The last registration of a connection, without its topics."""

    fingerprint: tuple[BrokerIdentity, bool, int, int]
    version: DataVersion
    filter_servers: list[str]


class RequestProcessor:
    """Answers requests from the tables and changes them; it sends no notifications."""

    def __init__(self, config: NamesrvConfig, routes: RouteInfoManager, kv: KvConfigManager) -> None:
        self._config = config
        self._routes = routes
        self._kv = kv

    # ---- brokers

    @Route(Code.REGISTER_BROKER, of_cluster(UPDATE), reads=False)
    def register_broker(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        ext = request.ext
        identity = _identity(request)
        check_crc(request.body, optional_int(ext, "bodyCrc32", 0))
        registration = self._registration(connection, identity, request)
        result = self._routes.register(
            identity,
            registration,
            connection=connection,
            ha_server_addr=ext.get("haServerAddr", ""),
            timeout_ms=optional_int(ext, "heartbeatTimeoutMillis", 0),
            drop_missing_topics=self._config.delete_topic_with_broker_registration,
            acting_master=optional_bool(ext, "enableActingMaster") if "enableActingMaster" in ext else None,
        )
        answer: dict[str, str] = {}
        if result.ha_server_addr is not None and result.master_addr is not None:
            answer = {"haServerAddr": result.ha_server_addr, "masterAddr": result.master_addr}
        body = b""
        if self._config.return_order_topic_config_to_broker:
            order = self._kv.namespace(ORDER_TOPIC_CONFIG)
            body = dumps({"table": order}) if order is not None else b""
        return _ok(request, body, answer)

    def _registration(
        self, connection: Connection, identity: BrokerIdentity, request: RemotingCommand
    ) -> BrokerRegistration:
        """Parse a registration; an unchanged one, which a broker sends every 30 s, is not parsed again."""
        compressed = optional_bool(request.ext, "compressed")
        body = request.body
        fingerprint = (identity, compressed, len(body), hash(body))  # SipHash with a random key of this process
        before: _Registered | None = connection.state.get(_REGISTERED)
        if (
            before is not None
            and before.fingerprint == fingerprint
            and self._routes.is_current(identity, before.version)
        ):
            return BrokerRegistration({}, before.version, before.filter_servers)
        found = parse_registration(body, compressed=compressed, max_topics=self._config.max_topics_per_broker)
        connection.state[_REGISTERED] = _Registered(fingerprint, found.data_version, found.filter_servers)
        return found

    @Route(Code.UNREGISTER_BROKER, of_cluster(UPDATE), reads=False)
    def unregister_broker(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        identity = _identity(request)
        self._routes.unregister(identity)
        log.info("broker deregistered: name=%r address=%r", identity.name, identity.address)
        return _ok(request)

    @Route(Code.BROKER_HEARTBEAT, of_cluster(UPDATE), reads=False)
    def broker_heartbeat(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        self._routes.heartbeat(require_str(request.ext, "clusterName"), require_str(request.ext, "brokerAddr"))
        return _ok(request)

    @Route(Code.QUERY_DATA_VERSION, of_cluster(UPDATE), reads=True)
    def query_data_version(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        """322: a broker registers again only if its version differs."""
        identity = _identity(request)
        asked = loads_as(request.body, DataVersion)
        changed, registered = self._routes.query_data_version(identity.cluster, identity.address, asked)
        body = dumps(registered) if registered is not None else b""
        return _ok(request, body, {"changed": "true" if changed else "false"})

    @Route(Code.WIPE_WRITE_PERM_OF_BROKER, of_cluster(UPDATE), reads=False)
    def wipe_write_perm(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        count = self._routes.set_writable(require_str(request.ext, "brokerName"), writable=False)
        return _ok(request, ext={"wipeTopicCount": str(count)})

    @Route(Code.ADD_WRITE_PERM_OF_BROKER, of_cluster(UPDATE), reads=False)
    def add_write_perm(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        count = self._routes.set_writable(require_str(request.ext, "brokerName"), writable=True)
        return _ok(request, ext={"addTopicCount": str(count)})

    # ---- routes and topics

    @Route(Code.GET_ROUTEINFO_BY_TOPIC, of_route, reads=True)
    def route(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        topic = require_str(request.ext, "topic")
        route = self._routes.route(topic)
        if route is None:
            remark = f"No topic route info in name server for the topic: {topic}"
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, remark)
        if self._config.order_message_enable:
            route.order_topic_conf = self._kv.get(ORDER_TOPIC_CONFIG, topic)
        return _ok(request, _in_dialect(request, route))

    @Route(Code.GET_BROKER_CLUSTER_INFO, of_cluster(GET), reads=True)
    def cluster_info(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        return _ok(request, _in_dialect(request, self._routes.cluster_info()))

    @Route(Code.GET_BROKER_MEMBER_GROUP, of_cluster(GET), reads=True)
    def member_group(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        group = self._routes.member_group(
            require_str(request.ext, "clusterName"), require_str(request.ext, "brokerName")
        )
        return _ok(request, _in_dialect(request, {"brokerMemberGroup": group}))

    @Route(Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, of_cluster(LIST), reads=True)
    def all_topics(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        if not self._config.enable_all_topic_list:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, "disable")
        return _topics(request, self._routes.topics())

    @Route(Code.GET_TOPICS_BY_CLUSTER, of_cluster(LIST), reads=True)
    def topics_of_cluster(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        return _topics(request, self._routes.topics_of_cluster(require_str(request.ext, "cluster")))

    @Route(Code.GET_SYSTEM_TOPIC_LIST_FROM_NS, of_cluster(LIST), reads=True)
    def system_topics(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        names, address = self._routes.system_topics()
        return _ok(request, dumps({"topicList": names, **({"brokerAddr": address} if address else {})}))

    @Route(Code.GET_UNIT_TOPIC_LIST, of_cluster(LIST), reads=True)
    def unit_topics(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        return _topics(request, self._routes.topics_by_flag(lambda flag: bool(flag & FLAG_UNIT)))

    @Route(Code.GET_HAS_UNIT_SUB_TOPIC_LIST, of_cluster(LIST), reads=True)
    def unit_subscription_topics(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        return _topics(request, self._routes.topics_by_flag(lambda flag: bool(flag & FLAG_UNIT_SUB)))

    @Route(Code.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST, of_cluster(LIST), reads=True)
    def unit_subscription_only_topics(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        return _topics(
            request, self._routes.topics_by_flag(lambda flag: flag & (FLAG_UNIT | FLAG_UNIT_SUB) == FLAG_UNIT_SUB)
        )

    @Route(Code.DELETE_TOPIC_IN_NAMESRV, of_topic(DELETE), reads=False)
    def delete_topic(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        topic = require_str(request.ext, "topic")
        self._routes.delete_topic(topic, request.ext.get("clusterName") or None)
        log.info("topic deleted: %r", topic)
        return _ok(request)

    @Route(Code.REGISTER_TOPIC_IN_NAMESRV, of_cluster(UPDATE), reads=False)
    def register_topic(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        topic = require_str(request.ext, "topic")
        if request.body:
            self._routes.register_topic(topic, loads_as(request.body, TopicRouteData).queue_datas)
        return _ok(request)

    # ---- settings

    @Route(Code.PUT_KV_CONFIG, of_cluster(UPDATE), reads=False)
    async def put_kv(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        namespace, key = require_str(request.ext, "namespace"), require_str(request.ext, "key")
        await self._kv.put(namespace, key, require_str(request.ext, "value"))
        return _ok(request)

    @Route(Code.DELETE_KV_CONFIG, of_cluster(UPDATE), reads=False)
    async def delete_kv(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        await self._kv.delete(require_str(request.ext, "namespace"), require_str(request.ext, "key"))
        return _ok(request)

    @Route(Code.GET_KV_CONFIG, of_cluster(GET), reads=True)
    def get_kv(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        namespace, key = require_str(request.ext, "namespace"), require_str(request.ext, "key")
        value = self._kv.get(namespace, key)
        if value is None:
            remark = f"No config item, Namespace: {namespace} Key: {key}"
            raise BrokerError(ResponseCode.QUERY_NOT_FOUND, remark)
        return _ok(request, ext={"value": value})

    @Route(Code.GET_KVLIST_BY_NAMESPACE, of_cluster(GET), reads=True)
    def kv_namespace(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        namespace = require_str(request.ext, "namespace")
        table = self._kv.namespace(namespace)
        if table is None:
            raise BrokerError(ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {namespace}")
        return _ok(request, dumps({"table": table}))

    @Route(Code.UPDATE_NAMESRV_CONFIG, of_cluster(UPDATE), reads=False)
    def update_config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """318: only live keys can be changed, never paths or ports."""
        try:
            text = request.body.decode()
            changes = {key: value for _, key, value in parse_properties(text, "update")}
            update_live(self._config, changes)
        except (ConfigError, UnicodeDecodeError) as error:
            raise BrokerError(ResponseCode.NO_PERMISSION, str(error)) from error
        if "logLevel" in changes:
            logs.set_level(self._config.log_level)
        log.info("configuration changed: client=%s:%d keys=%s", *connection.remote, sorted(changes))
        return _ok(request)

    @Route(Code.GET_NAMESRV_CONFIG, of_cluster(GET), reads=True)
    def get_config(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        return _ok(request, to_properties(self._config).encode())


ROUTES = routes_of(Route, [RequestProcessor])


def _ok(request: RemotingCommand, body: bytes = b"", ext: dict[str, str] | None = None) -> RemotingCommand:
    return RemotingCommand.response(request, ResponseCode.SUCCESS, ext=ext, body=body)


def _topics(request: RemotingCommand, topics: list[str]) -> RemotingCommand:
    return _ok(request, dumps({"topicList": topics}))


def _in_dialect(request: RemotingCommand, value: object) -> bytes:
    standard = request.version >= VERSION_STANDARD_JSON_ROUTE or optional_bool(request.ext, "acceptStandardJsonOnly")
    return dumps_standard(value) if standard else dumps_object_keys(value)


def _identity(request: RemotingCommand) -> BrokerIdentity:
    ext = request.ext
    cluster, name, address = (require_str(ext, field) for field in ("clusterName", "brokerName", "brokerAddr"))
    broker_id = require_int(ext, "brokerId")
    host, _, port = address.rpartition(":")
    if not (cluster and name and host and port.isdigit()) or max(map(len, (cluster, name, address))) > MAX_NAME:
        raise BrokerError(ResponseCode.SYSTEM_ERROR, f"register broker failed: no broker {name!r} at {address!r}")
    if not 0 <= broker_id < 1 << 31:
        raise BrokerError(ResponseCode.SYSTEM_ERROR, f"register broker failed: broker id {broker_id}")
    return BrokerIdentity(cluster, name, address, broker_id)
