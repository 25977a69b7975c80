"""What all parts of a client share: connections, the name servers, routes, the client's identity, the heartbeat."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from neve.client.model import MASTER_ID, BrokerInfo, MessageQueue
from neve.client.net.connection import NOT_MASTER, Connection, ConnectionPool
from neve.client.net.route import TopicRoute, parse_brokers, parse_route, route_from_default
from neve.client.options import ClientOptions
from neve.client.validators import check_timeout
from neve.errors import (
    BrokerError,
    ClientError,
    ConnectionFailed,
    NeveError,
    ProtocolError,
    RequestTimeout,
    UnknownOutcome,
    seconds_text,
)
from neve.record.ids import UniqueIdGenerator
from neve.remoting.body import ANSWER_NODES, NodeBudget, dumps, lenient_loads
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.names import DEFAULT_TOPIC

log = logging.getLogger(__name__)

T = TypeVar("T")
ConsumerData = dict[str, Any]
RequestHandler = Callable[[Connection, RemotingCommand], bool]
_SEPARATORS = re.compile(r"[;,\s]+")
_FORGOTTEN = float("-inf")  # instead of the time at which a route was asked for: it did not work
_DOUBT_S = 0.25  # a route that is younger is not asked for again on a mere doubt
_ELECTION_PAUSE_S = 0.1
_WATCH_S = 0.25  # from one question who is master to the next
_PATIENCE_S = 1.0  # so long a route that is at hand waits for a newer one


def parse_body(answer: RemotingCommand) -> Any:
    """The JSON in an answer's body.

    Raises:
        ProtocolError: it is none.
    """
    return lenient_loads(answer.body, NodeBudget(ANSWER_NODES)) if answer.body else {}


def require_success(answer: RemotingCommand) -> RemotingCommand:
    """The answer, if its code is SUCCESS; else raises BrokerError with its code and remark."""
    if answer.code != ResponseCode.SUCCESS:
        raise BrokerError(answer.code, answer.remark or "")
    return answer


def ext_int(answer: RemotingCommand, name: str) -> int:
    """A number among an answer's fields. Raises ProtocolError where it is missing or none."""
    try:
        return int((answer.ext or {})[name])
    except (KeyError, ValueError) as error:
        raise ProtocolError(f"an answer has no number {name!r}: {answer.ext}") from error


async def ended(run: asyncio.Future[Any]) -> None:
    """Wait until `run` has ended; if the caller is cancelled, `run` is cancelled and waited for as well."""
    try:
        await asyncio.wait({run})
    finally:
        if not run.done():
            run.cancel()
            await asyncio.wait({run})


class Session:
    """Opened once per client. Members of groups register their heartbeat data and their request handlers here."""

    def __init__(self, namesrv: str, options: ClientOptions) -> None:
        self.options = options
        self._namesrvs = [address for address in _SEPARATORS.split(namesrv) if address]
        if not self._namesrvs:
            raise ClientError("no name server given")
        self.pool = self._new_pool(self._connected)
        self.client_id = ""
        self._ids: UniqueIdGenerator | None = None
        self._routes: dict[str, tuple[float, TopicRoute]] = {}
        self._asking: dict[str, asyncio.Task[TopicRoute]] = {}
        self._known_addresses: dict[str, bool] = {}  # of brokers; whether it is a master
        self.consumers: dict[str, Callable[[], ConsumerData]] = {}
        # By group; a handler answers what it knows, and says whether it did.
        self.request_handlers: dict[str, RequestHandler] = {}
        # By request code, for what names no consumer group: check-backs and replies.
        self.code_handlers: dict[int, RequestHandler] = {}
        self._producer_groups: set[str] = set()
        # Of these, the groups that the masters of all brokers must know, whether or not a route names them.
        self._cluster_wide_groups: set[str] = set()
        self._cluster: Mapping[str, BrokerInfo] = {}  # the latest list of all brokers; kept for such groups only
        self._watched: set[Connection] = set()  # to masters that are silent
        # Address -> the producer groups that it has acknowledged over its present connection.
        self._introduced: dict[str, frozenset[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    # ---- life

    async def start(self) -> None:
        """Reaches a name server.

        Raises:
            ConnectionFailed: none can be reached.
        """
        ip = "127.0.0.1"
        problems: list[str] = []
        for address in list(self._namesrvs):
            try:
                ip = (await self.pool.get(address)).local_ip
                break
            except ConnectionFailed as error:
                log.info("%s", error)
                problems.append(str(error))
                self._namesrvs.append(self._namesrvs.pop(0))
        else:
            raise ConnectionFailed(f"no name server can be used: {'; '.join(problems)}")
        self.client_id = f"{ip}@{self.options.instance_name}"
        salt_of_ids = int.from_bytes(self.options.entropy(4))
        self._ids = UniqueIdGenerator(ip, os.getpid(), salt_of_ids, self.options.now_ms())
        self.spawn(self._heartbeat_forever(), "heartbeat")

    def another_pool(self) -> ConnectionPool:
        """Connections that one part of the client has for itself, to close when it wants."""
        return self._new_pool(lambda _: None)

    def _new_pool(self, on_connect: Callable[[str], None]) -> ConnectionPool:
        options = self.options
        credentials, tls = options.credentials, options.tls
        return ConnectionPool(
            options.connect_timeout,
            self._serve,
            on_connect,
            on_lost=self.doubt,
            on_refused=self._refused,
            credentials=credentials,
            tls=tls,
        )

    async def close(self) -> None:
        self._is_closing = True
        for task in list(self._tasks):
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for group in list(self._producer_groups):
                await self.leave_producer_group(group)
        finally:
            await self.pool.close()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs `work` beside the callers until it ends or the client closes; a failure is logged."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s ended: %s", task.get_name(), error, exc_info=error)

    def next_unique_key(self) -> str:
        if self._ids is None:
            raise ClientError("the client is not started: use `async with connect(...)`")
        return self._ids.next(self.options.now_ms())

    @property
    def namesrv_addresses(self) -> str:
        return ";".join(self._namesrvs)

    # ---- requests

    async def within(
        self,
        timeout: float | None,
        work: Coroutine[Any, Any, T],
        *,
        too_late: type[RequestTimeout | ConnectionFailed] = RequestTimeout,
    ) -> T:
        """What `work` gives, if it does so within `timeout` seconds, by default those of a whole call.

        Raises:
            RequestTimeout: `work` did not end in time; its requests may have been executed. Instead of this error
                `too_late` is raised, for work that sends its only request in its last step.
            ClientError: `timeout` is not positive.
        """
        try:
            check_timeout(timeout)
        except ClientError:
            work.close()
            raise
        limit = timeout or self.options.timeout
        try:
            async with asyncio.timeout(limit):
                return await work
        except NeveError:  # may be a TimeoutError, of a single request
            raise
        except TimeoutError:
            raise too_late(f"not done within {seconds_text(limit)}") from None

    async def ask(
        self, address: str, code: int, ext: Mapping[str, str], *, body: bytes = b"", timeout: float | None = None
    ) -> RemotingCommand:
        """The answer of a broker, if it is a success.

        Raises:
            BrokerError: the broker refused.
            NeveError: it could not be asked, or did not answer.
        """
        check_timeout(timeout)
        limit = timeout or self.options.attempt_timeout
        return require_success(await self.pool.invoke(address, code, ext, body=body, timeout=limit))

    async def ask_namesrv(self, code: int, ext: Mapping[str, str]) -> RemotingCommand:
        """The answer of the first name server that gives one, whatever its code.

        Raises:
            BrokerError: REQUEST_CODE_NOT_SUPPORTED, for what every name server knows: it is none.
        """
        problem: NeveError | None = None
        for _ in range(len(self._namesrvs)):
            address = self._namesrvs[0]
            try:
                answer = await self.pool.invoke(address, code, ext, timeout=self.options.attempt_timeout)
                if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                    why = f"{address} is no name server; is it the address of a broker?"
                    raise BrokerError(answer.code, f"{why} It answered: {answer.remark}")
                return answer
            except (ConnectionFailed, UnknownOutcome) as error:
                problem = error
                if self._namesrvs[0] == address:
                    self._namesrvs.append(self._namesrvs.pop(0))
        assert problem is not None
        raise problem

    async def _read_namesrv(self, code: int, ext: Mapping[str, str]) -> RemotingCommand:
        """As `ask_namesrv`, for questions that precede a request.

        Raises:
            ConnectionFailed: no name server answers, so the request that needs the answer was not sent.
        """
        try:
            return await self.ask_namesrv(code, ext)
        except UnknownOutcome as error:
            raise ConnectionFailed(f"no name server answers: {error}") from error

    # ---- routes

    async def route(self, topic: str, *, fresh: bool = False) -> TopicRoute:
        """The topic's route. One that was good stays until a newer one is there (as in RocketMQ's MQClientInstance): a
        name server that was restarted knows no topic until the brokers register again, up to 30 s later.

        One older than `route_interval` is renewed beside the caller. With `fresh`, and after `forget_route`, the name
        servers are waited for, though not for long while an older route is at hand.

        Raises:
            BrokerError: TOPIC_NOT_EXIST, and no route was ever known.
        """
        known = self._routes.get(topic)
        if known is None:
            return await asyncio.shield(self._asked(topic))
        asked_at, route = known
        if not fresh and asyncio.get_running_loop().time() - asked_at < self.options.route_interval:
            return route
        asked = self._asked(topic)
        if not fresh and asked_at != _FORGOTTEN:
            return route
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await asyncio.shield(asked)
        except (NeveError, TimeoutError) as error:
            log.info("the route of %s stays as it was: %r", topic, error)
            self._keep_route(topic)
            return route

    async def route_now(self, topic: str) -> TopicRoute:
        """What the name servers say at this moment.

        Raises:
            BrokerError: TOPIC_NOT_EXIST.
        """
        return await asyncio.shield(self._asked(topic))

    async def publish_route(self, topic: str, *, fresh: bool = False) -> TopicRoute:
        """As `route`; of a topic that does not exist the one that it would be created with."""
        try:
            return await self.route(topic, fresh=fresh)
        except BrokerError as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            try:
                return route_from_default(topic, await self.route(DEFAULT_TOPIC))
            except BrokerError:
                raise error from None

    async def master(self, queue: MessageQueue) -> str:
        """The address of the queue's master.

        Raises:
            ConnectionFailed: no master of that broker is known, so nothing was asked of it.
        """
        for fresh in (False, True):
            address = (await self.publish_route(queue.topic, fresh=fresh)).master(queue.broker_name)
            if address is not None:
                return address
        raise ConnectionFailed(f"no master of {queue.broker_name} is known")

    async def ask_master(
        self,
        queue: MessageQueue,
        address: str,
        code: int,
        ext: Mapping[str, str],
        *,
        body: bytes = b"",
        timeout: float,
        patience: float,
        pool: ConnectionPool | None = None,
    ) -> RemotingCommand:
        """The answer of the queue's master, whatever its code.

        After `patience` seconds without one the name servers are asked, again and again, where the broker has replicas:
        a master that is frozen or cut off does not say that there is another one.

        Raises:
            UnknownOutcome: no answer came in time, or there is another master.
        """
        pool = pool or self.pool
        if not self.is_set(queue):
            return await pool.invoke(address, code, ext, body=body, timeout=timeout)
        timer = asyncio.get_running_loop().call_later(patience, self._watch, queue, pool, address)
        try:
            return await pool.invoke(address, code, ext, body=body, timeout=timeout)
        finally:
            timer.cancel()

    async def at_master(
        self,
        queue: MessageQueue,
        code: int,
        ext: Mapping[str, str],
        *,
        body: bytes = b"",
        may_repeat: bool = False,
        find: Callable[[MessageQueue], Awaitable[str]] | None = None,
    ) -> RemotingCommand:
        """The answer of the queue's master, if it is a success. Of a broker with replicas that is whoever is master
        within the time of a whole call: it may be another one by now, or nobody yet.

        `may_repeat`: to ask a second time does no harm, should it have been done already. `find` gives the address, in
        place of the master's.

        Raises:
            NeveError: as `ask`; of who was asked last.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + self.options.timeout
        find = find or self.master
        while True:
            try:
                address = await find(queue)
                limit = max(min(self.options.attempt_timeout, deadline - now()), 0.001)
                return await self.ask(address, code, ext, body=body, timeout=limit)
            except UnknownOutcome as error:
                problem: NeveError = error
                is_final = not may_repeat
            except BrokerError as error:
                problem, is_final = error, error.code not in NOT_MASTER
            except ConnectionFailed as error:
                problem, is_final = error, False
            if is_final or not self.is_set(queue) or now() >= deadline:
                raise problem
            self.pool.check_usable()
            self.forget_route(queue.topic)
            await asyncio.sleep(min(_ELECTION_PAUSE_S, deadline - now()))

    def _watch(self, queue: MessageQueue, pool: ConnectionPool, address: str) -> None:
        connection = pool.open_connection(address)
        if connection is not None and connection not in self._watched and not self._is_closing:
            self._watched.add(connection)
            self.spawn(self._watch_silent(queue, connection), f"watch {address}")

    async def _watch_silent(self, queue: MessageQueue, connection: Connection) -> None:
        """Until it says something, nobody waits for it, or another is master."""
        address, heard = connection.address, connection.heard
        try:
            while not connection.is_closed and connection.is_asked and connection.heard == heard:
                try:
                    master = (await self.route_now(queue.topic)).master(queue.broker_name)
                except NeveError as error:
                    log.info("%s is silent, and so are the name servers: %s", address, error)
                    master = None
                if master not in (None, address):
                    log.warning("%s is silent, and %s is the master of %s now", address, master, queue.broker_name)
                    connection.give_up()
                    return
                await asyncio.sleep(_WATCH_S)
        finally:
            self._watched.discard(connection)

    def forget_route(self, topic: str) -> None:
        """The next use waits for the name servers; while they are away the old route is better than none."""
        known = self._routes.get(topic)
        if known is not None:
            self._routes[topic] = (_FORGOTTEN, known[1])

    def is_set(self, queue: MessageQueue) -> bool:
        """Whether the queue's broker has replicas, as far as is known."""
        known = self._routes.get(queue.topic) or self._routes.get(DEFAULT_TOPIC)
        return known is not None and known[1].is_set(queue.broker_name)

    def doubt(self, address: str) -> None:
        """Something ended there: who uses a route that names it asks the name servers, now and then."""
        self._doubt(address, lambda _route, _broker: True)

    def _refused(self, address: str) -> None:
        """A member of a set may have another role by now. A broker that is alone is busy, and stays where it is."""
        self._doubt(address, TopicRoute.is_set)

    def _doubt(self, address: str, may_have_moved: Callable[[TopicRoute, str], bool]) -> None:
        now = asyncio.get_running_loop().time()
        for topic, (asked_at, route) in list(self._routes.items()):
            if asked_at > now - _DOUBT_S:
                continue
            named = (name for name, broker in route.brokers.items() if address in broker.addresses.values())
            if any(may_have_moved(route, name) for name in named):
                self._routes[topic] = (_FORGOTTEN, route)

    def keeper(self, queue: MessageQueue) -> Connection | None:
        """The connection to the queue's master, as far as both are known: another one may not have what was said."""
        address = self.known_master(queue)
        return None if address is None else self.pool.open_connection(address)

    def known_master(self, queue: MessageQueue) -> str | None:
        """The address of the queue's master, as the route at hand has it."""
        known = self._routes.get(queue.topic)
        return None if known is None else known[1].master(queue.broker_name)

    def drop_route(self, topic: str) -> None:
        """The topic is no more."""
        self._routes.pop(topic, None)

    def _keep_route(self, topic: str) -> None:
        """The name servers were asked in vain: again after `route_interval`, or when the route fails."""
        known = self._routes.get(topic)
        if known is not None:
            self._routes[topic] = (asyncio.get_running_loop().time(), known[1])

    def _asked(self, topic: str) -> asyncio.Task[TopicRoute]:
        """The question to the name servers that is under way; all who want the route wait for the same."""
        asked = self._asking.get(topic)
        if asked is None:
            asked = self._asking[topic] = asyncio.create_task(self._fetch_route(topic), name=f"route of {topic}")
            asked.add_done_callback(lambda done: self._answered(topic, done))
        return asked

    def _answered(self, topic: str, asked: asyncio.Task[TopicRoute]) -> None:
        self._asking.pop(topic, None)
        if not asked.cancelled() and asked.exception() is not None:
            self._keep_route(topic)

    async def _fetch_route(self, topic: str) -> TopicRoute:
        answer = require_success(await self._read_namesrv(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}))
        route = parse_route(topic, parse_body(answer))
        self._routes[topic] = (asyncio.get_running_loop().time(), route)
        self._learn(route.brokers)
        return route

    async def brokers(self) -> dict[str, BrokerInfo]:
        """All brokers by name."""
        answer = require_success(await self._read_namesrv(RequestCode.GET_BROKER_CLUSTER_INFO, {}))
        found = parse_brokers((parse_body(answer).get("brokerAddrTable") or {}).values())
        self._learn(found)
        return found

    def _learn(self, brokers: Mapping[str, BrokerInfo]) -> None:
        for broker in brokers.values():
            for number, address in broker.addresses.items():
                was, self._known_addresses[address] = self._known_addresses.get(address), number == MASTER_ID
                if was not in (None, number == MASTER_ID) and not self._is_closing:
                    # A new master has to know its producers, and who does not hear of a change may be dead.
                    self.spawn(self._heartbeat_to(address), f"heartbeat to {address}")

    # ---- heartbeat

    def produces(self, group: str) -> None:
        """From now on heartbeats carry this producer group."""
        if group not in self._producer_groups:
            self._producer_groups.add(group)
            self.spawn(self.heartbeat(), "first heartbeat")

    async def introduce(self, group: str, brokers: Iterable[BrokerInfo]) -> None:
        """Returns when the masters of these brokers know this client as a producer of `group`: they may have to ask it.

        Best effort, as every heartbeat: a broker that is away learns it when it is back.
        """
        self._producer_groups.add(group)
        masters = [broker.master for broker in brokers if broker.master is not None]
        strangers = [address for address in masters if group not in self._introduced.get(address, ())]
        await asyncio.gather(*(self._heartbeat_to(address) for address in strangers))

    async def introduce_everywhere(self, group: str) -> None:
        """Make this client known as a producer of `group` to the masters of all brokers, until it leaves the group.

        Every heartbeat reads the list of brokers again, so brokers that join later learn of the group, too.

        Raises:
            NeveError: no name server returned the list of brokers.
        """
        self._cluster = await self.brokers()
        self._cluster_wide_groups.add(group)
        try:
            await self.introduce(group, self._cluster.values())
        except BaseException:
            self._forget_producer_group(group)
            raise

    async def leave_producer_group(self, group: str) -> None:
        """Brokers send nothing more for this group; none has to find out by silence."""
        self._forget_producer_group(group)
        await self.unregister({"producerGroup": group})

    def _forget_producer_group(self, group: str) -> None:
        self._producer_groups.discard(group)
        self._cluster_wide_groups.discard(group)

    async def heartbeat(self) -> None:
        """Tells all known brokers which groups this client is in; one that fails is tried again next time."""
        await self._refresh_cluster()
        self._forget_unlisted_brokers()
        await asyncio.gather(*(self._heartbeat_to(address) for address in list(self._known_addresses)))

    async def _refresh_cluster(self) -> None:
        """Read the list of all brokers again if a group needs it; keep the present list if no name server answers."""
        if not self._cluster_wide_groups:
            self._cluster = {}
            return
        try:
            async with asyncio.timeout(_PATIENCE_S):
                self._cluster = await self.brokers()
        except (NeveError, TimeoutError) as error:
            log.info("the list of brokers is not refreshed: %r", error)

    def _forget_unlisted_brokers(self) -> None:
        """Forget addresses that neither a route nor the list of all brokers names, as RocketMQ's clients do."""
        listed = [self._cluster, *(route.brokers for _, route in self._routes.values())]
        named = {at for brokers in listed for broker in brokers.values() for at in broker.addresses.values()}
        for address in self._known_addresses.keys() - named:
            del self._known_addresses[address]
            self._introduced.pop(address, None)

    async def unregister(self, groups: Mapping[str, str]) -> None:
        """Leaves a group at once instead of by silence. Best effort: a broker that is away drops us by itself."""
        ext = {"clientID": self.client_id, **groups}

        async def leave(address: str) -> None:
            try:
                await self.ask(address, RequestCode.UNREGISTER_CLIENT, ext, timeout=1.0)
            except NeveError as error:
                log.info("leaving %s at %s: %s", groups, address, error)

        await asyncio.gather(*(leave(address) for address in list(self._known_addresses)))

    async def _heartbeat_to(self, address: str) -> None:
        groups = frozenset(self._producer_groups)
        producers = [{"groupName": group} for group in sorted(groups)]
        consumers = [describe() for describe in self.consumers.values()]
        if not consumers and not (producers and self._known_addresses.get(address)):
            return
        data = {
            "clientID": self.client_id,
            "consumerDataSet": consumers,
            "heartbeatFingerprint": 0,
            "producerDataSet": producers,
            "withoutSub": False,
        }
        try:
            await self.ask(address, RequestCode.HEART_BEAT, {}, body=dumps(data))
        except NeveError as error:
            log.info("heartbeat to %s: %s", address, error)
        else:
            self._introduced[address] = groups

    async def _heartbeat_forever(self) -> None:
        while True:
            await asyncio.sleep(self.options.heartbeat_interval)
            await self.heartbeat()

    def _connected(self, address: str) -> None:
        """A broker drops what came over a connection with the connection, so it is told again over the new one."""
        self._introduced.pop(address, None)
        if address in self._known_addresses and not self._is_closing:
            self.spawn(self._heartbeat_to(address), f"heartbeat to {address}")

    # ---- requests of brokers

    def _serve(self, connection: Connection, request: RemotingCommand) -> None:
        group = (request.ext or {}).get("consumerGroup") or (request.ext or {}).get("group") or ""
        handler = self.code_handlers.get(request.code) or self.request_handlers.get(group)
        if handler is None or not handler(connection, request):
            remark = f"request type {request.code} not supported"
            connection.answer(request, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark)
