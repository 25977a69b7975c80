"""Queries of messages by key (12) and by the id that contains the physical offset (33)."""

from access.permissions import GET, SUB, of_cluster, of_topic
from broker.reading.tiered_store import TieredStore
from broker.requests.route import MEMBERS, BrokerRoute, Waits
from broker.store.message_store import MessageStore
from infra.clock import Clock
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import optional_bool, require_int, require_str

_MAX_HITS = 64
_UNIQUE_HITS = 32


class QueryMessageProcessor:
    """Returns messages by key and by id from both tiers (RocketMQ's QueryMessageProcessor)."""

    def __init__(self, clock: Clock, tiered: TieredStore, store: MessageStore) -> None:
        self._clock, self._tiered, self._store = clock, tiered, store

    @BrokerRoute(Code.QUERY_MESSAGE, of_topic(SUB | GET), MEMBERS, Waits.NO, reads=True, hides_topics=True)
    async def query(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return messages by key (12), the oldest first; the remark describes the range that was not searched."""
        ext = request.ext
        unique = optional_bool(ext, "_UNIQUE_KEY_QUERY")
        count = _UNIQUE_HITS if unique else min(max(require_int(ext, "maxNum"), 1), _MAX_HITS)
        found = await self._tiered.query(
            require_str(ext, "topic"),
            require_str(ext, "key"),
            count,
            require_int(ext, "beginTimestamp"),
            require_int(ext, "endTimestamp"),
        )
        hits = found.records[::-1]
        left = f"not searched: {found.unsearched}" if found.unsearched else None
        if not hits and left:
            raise BrokerError(
                ResponseCode.SYSTEM_BUSY, f"nothing found, but {left}; try a narrower time range, or later"
            )
        if not hits:
            raise BrokerError(ResponseCode.QUERY_NOT_FOUND, "can not find message, maybe time range not correct")
        answer = {
            "indexLastUpdateTimestamp": str(self._clock.now_ms()),
            "indexLastUpdatePhyoffset": str(self._store.max_physical_offset),
        }
        return RemotingCommand.response(request, ResponseCode.SUCCESS, left, ext=answer, parts=hits)

    # The record at an offset may belong to any topic, so the permission is one on the cluster.
    @BrokerRoute(Code.VIEW_MESSAGE_BY_ID, of_cluster(GET), MEMBERS, Waits.NO, reads=True, hides_topics=False)
    async def view(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return the message at a physical offset (33)."""
        offset = require_int(request.ext, "offset")
        record = await self._tiered.record_at(offset)
        if record is None:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"can not find message by the offset, {offset}")
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=bytes(record))
