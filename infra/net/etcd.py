"""A client of etcd: read, list, compare and swap, leases.

It uses the JSON gateway (`POST /v3/kv/txn` etc., keys and values in base64), which every etcd since 3.4 has: gRPC would
add a second event loop, in C.

    etcd://host[:2379],host[:2379],host[:2379]/prefix

Requests go to one endpoint; if it does not answer, to the next one, until `WHOLE_S` has passed. Reads are linearizable.
A swap compares the revision and the bytes that the caller read, so it is safe to repeat: it takes effect at most once.
If a repeated swap finds its own value, the earlier attempt has succeeded.

All endpoints have to belong to one cluster, also after a restore: the client checks the cluster of each endpoint before
it sends it other requests.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from http import HTTPStatus
from typing import NamedTuple, TypeVar

import aiohttp
import msgspec

from neve.errors import NeveError

log = logging.getLogger(__name__)

PORT = 2379
TRY_S = 0.8  # per endpoint: the usual answer takes milliseconds, with a slow disk tenths of a second
WHOLE_S = 2.5  # for all endpoints; less than the time that RocketMQ's brokers wait for a controller
_ROUND_PAUSE_S = 0.1  # after a try of all endpoints
_MAX_CONNECTIONS = 64

# gRPC codes by which an endpoint rejects a request for good.
_REFUSED = frozenset({3, 5, 7, 8, 9, 11, 12, 16})
_NEEDS_TOKEN = re.compile(r"invalid auth token|user name is empty|revision of auth store|revision in header is old")
_AUTH_IS_OFF = "authentication is not enabled"


class EtcdError(NeveError):
    """The request failed, or its outcome is unknown."""

    def __init__(self, remark: str) -> None:
        super().__init__(None, remark)


class EtcdRefused(EtcdError):
    """etcd rejected the request; a retry would not help."""


class EtcdAway(EtcdError):
    """No endpoint answered in time; the outcome is unknown if a request was sent."""


class EtcdUrl(NamedTuple):
    """The parts of an `etcd://` URL."""

    endpoints: tuple[str, ...]
    prefix: str


def parse_url(url: str) -> EtcdUrl:
    """Parse an `etcd://` URL. Raises ValueError."""
    scheme, separator, rest = url.partition("://")
    hosts, _, prefix = rest.partition("/")
    if scheme != "etcd" or not separator:
        raise ValueError("expected etcd://host[:port],host[:port]/prefix")
    endpoints = tuple(_endpoint(host.strip()) for host in hosts.split(","))
    if len(set(endpoints)) < len(endpoints):
        raise ValueError("a host is named twice")
    if not prefix.strip("/"):
        raise ValueError("expected a prefix after the hosts: etcd://host/prefix")
    return EtcdUrl(endpoints, prefix.strip("/"))


def _endpoint(host: str) -> str:
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:/@?#\s]+)(?::(\d{1,5}))?", host)
    if found is None:
        raise ValueError(f"{host!r} is not host or host:port")
    return f"{found[1]}:{found[2] or PORT}"


class KeyValue(msgspec.Struct, frozen=True):
    """A key with the revisions of its last write (`mod_revision`) and of its creation (`create_revision`)."""

    key: bytes
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    lease: int = 0


class Header(msgspec.Struct, frozen=True):
    """The cluster of an answer, and its revision (the number of writes)."""

    cluster_id: int = 0
    revision: int = 0


class Read(msgspec.Struct, frozen=True):
    """The result of a read, in the order of the keys. gRPC's JSON omits fields that are zero or empty."""

    header: Header
    kvs: list[KeyValue] = []
    count: int = 0


class _Done(msgspec.Struct, frozen=True):
    response_range: Read | None = None


class _Written(msgspec.Struct, frozen=True):
    header: Header
    succeeded: bool = False
    responses: list[_Done] = []


class _Lease(msgspec.Struct, frozen=True):
    id: int = msgspec.field(default=0, name="ID")
    ttl: int = msgspec.field(default=0, name="TTL")


class _KeptAlive(msgspec.Struct, frozen=True):
    result: _Lease = _Lease()


class _Token(msgspec.Struct, frozen=True):
    token: str = ""


class _Refusal(msgspec.Struct, frozen=True):
    code: int = 2
    message: str = ""


T = TypeVar("T")


class _Failed(Exception):
    """A request to one endpoint failed. `may_be_done`: it may have taken effect."""

    def __init__(self, why: str, *, may_be_done: bool = False) -> None:
        super().__init__(why)
        self.may_be_done = may_be_done


class _TokenNeeded(Exception):
    """The endpoint requires a token, or a new one."""


class Etcd:
    """A client of one cluster, on the event loop."""

    def __init__(
        self,
        target: EtcdUrl,
        *,
        tls: ssl.SSLContext | None = None,
        user: str = "",
        password: str = "",
    ) -> None:
        self._endpoints, self._tls = target.endpoints, tls
        self._probe = _json({"key": f"{target.prefix}/".encode(), "serializable": True, "limit": 1, "keys_only": True})
        self._user, self._password, self._token = user, password, ""
        self._present = 0
        self._cluster_id = 0
        self._identified: set[str] = set()
        self._session: aiohttp.ClientSession | None = None

    @property
    def cluster_id(self) -> int:
        """The cluster of the last answer; 0 before the first."""
        return self._cluster_id

    async def close(self) -> None:
        """Close all connections; requests in flight fail."""
        if self._session is not None:
            await self._session.close()

    async def read(self, key: bytes) -> Read:
        """Read one key, linearizable."""
        answer, _ = await self._ask("kv/range", {"key": key}, Read)
        return answer

    async def read_all(self, prefix: bytes, limit: int, *, keys_only: bool = False) -> Read:
        """Read at most `limit` keys with a prefix; `count` in the result is the number of all."""
        asked = {"key": prefix, "range_end": _end_of(prefix), "limit": limit, "keys_only": keys_only}
        answer, _ = await self._ask("kv/range", asked, Read)
        return answer

    async def swap(self, key: bytes, seen: KeyValue | None, value: bytes | None, *, lease: int = 0) -> int | None:
        """Write a value (None removes the key) if the key is unchanged since it was read as `seen`.

        Return the revision of the write, or None if the key has changed. After an EtcdError the outcome is unknown.
        """
        revision = seen.mod_revision if seen is not None else 0
        compare = [{"target": "MOD", "result": "EQUAL", "key": key, "mod_revision": revision}]
        if seen is not None:  # a restored cluster assigns the same revisions again
            compare.append({"target": "VALUE", "result": "EQUAL", "key": key, "value": seen.value})
        put, remove = (
            {"request_put": {"key": key, "value": value, "lease": lease}},
            {"request_delete_range": {"key": key}},
        )
        write: object = put if value is not None else remove
        wanted = {"compare": compare, "success": [write], "failure": [{"request_range": {"key": key}}]}
        answer, is_repeated = await self._ask("kv/txn", wanted, _Written)
        if answer.succeeded:
            return answer.header.revision
        if not is_repeated:
            return None
        found = next((done.response_range for done in answer.responses if done.response_range is not None), None)
        now = found.kvs[0] if found is not None and found.kvs else None
        if value is None:
            return answer.header.revision if now is None else None
        return now.mod_revision if now is not None and now.value == value and now.mod_revision != revision else None

    async def grant(self, seconds: int) -> int:
        """Create a lease: etcd removes its keys when it was not kept alive for `seconds`."""
        answer, _ = await self._ask("lease/grant", {"TTL": seconds}, _Lease)
        return answer.id

    async def keep_alive(self, lease: int) -> bool:
        """Renew a lease; return False if it has expired and its keys are gone."""
        answer, _ = await self._ask("lease/keepalive", {"ID": lease}, _KeptAlive)
        return answer.result.ttl > 0

    async def revoke(self, lease: int) -> None:
        """End a lease; etcd removes its keys."""
        await self._ask("lease/revoke", {"ID": lease}, _Lease)

    # ---- failover between endpoints

    async def _ask(self, path: str, request: object, kind: type[T]) -> tuple[T, bool]:
        """Return the first answer, and whether an earlier attempt may have taken effect."""
        loop, body = asyncio.get_running_loop(), _json(request)
        until = loop.time() + WHOLE_S
        is_repeated, tries, failures = False, 0, dict[str, str]()
        while (left_s := until - loop.time()) > 0:
            endpoint = self._endpoints[self._present]
            try:
                async with asyncio.timeout(min(TRY_S, left_s)):
                    await self._identify(endpoint)
                    answer = await self._post_with_token(endpoint, path, body)
                return self._decoded(endpoint, answer, kind), is_repeated
            except TimeoutError:
                failures[endpoint] = "does not answer"
                is_repeated = True
            except _Failed as failed:
                failures[endpoint] = str(failed)
                is_repeated |= failed.may_be_done
            self._leave(endpoint)
            tries += 1
            if tries % len(self._endpoints) == 0:
                await asyncio.sleep(_ROUND_PAUSE_S)
        reasons = "; ".join(f"{endpoint}: {why}" for endpoint, why in failures.items())
        raise EtcdAway(f"etcd does not answer: {reasons}{'; it may have been done' if is_repeated else ''}")

    def _leave(self, endpoint: str) -> None:
        self._identified.discard(endpoint)
        if self._endpoints[self._present] == endpoint:
            self._present = (self._present + 1) % len(self._endpoints)

    def _decoded(self, endpoint: str, answer: bytes, kind: type[T]) -> T:
        try:
            decoded = msgspec.json.decode(answer, type=kind, strict=False)  # 64-bit numbers are strings in gRPC's JSON
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _Failed(f"invalid answer: {error}", may_be_done=True) from error
        header = getattr(decoded, "header", None)
        if isinstance(header, Header) and header.cluster_id != self._cluster_id:
            raise _Failed("the answer is from another cluster than the last one", may_be_done=True)
        return decoded

    # ---- the cluster of an endpoint

    async def _identify(self, endpoint: str) -> None:
        """Check that an endpoint belongs to the same cluster as the others. Raises _Failed."""
        if endpoint in self._identified:
            return
        cluster_id = await self._cluster_of(endpoint)
        if self._cluster_id and cluster_id != self._cluster_id:
            await self._adopt(endpoint, cluster_id)
        self._cluster_id = cluster_id
        self._identified.add(endpoint)

    async def _cluster_of(self, endpoint: str) -> int:
        answer = await self._post_with_token(endpoint, "kv/range", self._probe)
        try:
            return msgspec.json.decode(answer, type=Read, strict=False).header.cluster_id
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _Failed(f"invalid answer: {error}") from error

    async def _adopt(self, endpoint: str, cluster_id: int) -> None:
        """Accept another cluster, restored or recreated, if all endpoints belong to it. Raises _Failed if not."""
        others = [other for other in self._endpoints if other != endpoint]
        found = await asyncio.gather(*(self._cluster_if_reachable(other) for other in others))
        for other, other_id in zip(others, found, strict=True):
            if other_id != cluster_id:
                which = "unreachable" if other_id is None else "of another cluster"
                before = f"not {self._cluster_id:x} as before; {other} is {which}"
                raise _Failed(f"it is of cluster {cluster_id:x}, {before}")
        log.warning("etcd cluster changed: restored or recreated, cluster_id=%x", cluster_id)
        self._identified.clear()

    async def _cluster_if_reachable(self, endpoint: str) -> int | None:
        try:
            async with asyncio.timeout(TRY_S / 2):
                return await self._cluster_of(endpoint)
        except (TimeoutError, _Failed, EtcdRefused):
            return None

    # ---- one request

    async def _post_with_token(self, endpoint: str, path: str, body: bytes) -> bytes:
        try:
            return await self._post(endpoint, path, body)
        except _TokenNeeded as first:
            if not self._user:
                raise EtcdRefused(f"{endpoint}: {first}: etcd requires a user") from first
            await self._authenticate(endpoint)
            try:
                return await self._post(endpoint, path, body)
            except _TokenNeeded as error:
                raise _Failed(f"{error}, for a token that it has just issued") from error

    async def _authenticate(self, endpoint: str) -> None:
        self._token = ""
        try:
            answer = await self._post(
                endpoint, "auth/authenticate", _json({"name": self._user, "password": self._password})
            )
        except EtcdRefused as error:
            if _AUTH_IS_OFF in error.remark:
                return
            raise
        try:
            self._token = msgspec.json.decode(answer, type=_Token).token
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _Failed(f"invalid answer: {error}") from error

    async def _post(self, endpoint: str, path: str, body: bytes) -> bytes:
        scheme = "https" if self._tls is not None else "http"
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = self._token
        try:
            async with self._opened().post(
                f"{scheme}://{endpoint}/v3/{path}", data=body, headers=headers, allow_redirects=False
            ) as answer:
                content = await answer.read()
                status = answer.status
        except aiohttp.ClientConnectorError as error:
            raise _Failed(str(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Failed(repr(error), may_be_done=True) from error
        if status == HTTPStatus.OK:
            return content
        raise _refused(endpoint, status, content)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=_MAX_CONNECTIONS, ssl=self._tls if self._tls is not None else True)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None))
        return self._session


def _refused(endpoint: str, status: int, content: bytes) -> Exception:
    try:
        refusal = msgspec.json.decode(content, type=_Refusal)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        if status == HTTPStatus.NOT_FOUND:
            return EtcdRefused(f"{endpoint} is not an etcd server with a JSON gateway (--enable-grpc-gateway)")
        return _Failed(f"status {status}", may_be_done=True)
    if _NEEDS_TOKEN.search(refusal.message):
        return _TokenNeeded(refusal.message)
    if refusal.code in _REFUSED:
        return EtcdRefused(f"{endpoint}: {refusal.message}")
    return _Failed(refusal.message, may_be_done=True)


def _end_of(prefix: bytes) -> bytes:
    """Return the first key after all keys with the prefix."""
    assert prefix and prefix[-1] < 0xFF
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
