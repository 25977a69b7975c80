"""First and last offsets of queues, and offsets by time (29 to 32)."""

from access.permissions import GET, PUB, SUB, of_topic
from broker.reading.tiered_store import TieredStore
from broker.requests.route import IN_SYNC, BrokerRoute, Waits
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting import names
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import require_int, require_str


class QueueRangeProcessor:
    """Returns offsets over both tiers."""

    def __init__(self, tiered: TieredStore) -> None:
        self._tiered = tiered

    @BrokerRoute(Code.GET_MAX_OFFSET, of_topic(PUB | SUB | GET), IN_SYNC, Waits.NO, reads=True, hides_topics=True)
    def max_offset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic, queue = self._queue(request)
        return _offset(request, self._tiered.max_offset(topic, queue))

    @BrokerRoute(Code.GET_MIN_OFFSET, of_topic(PUB | SUB | GET), IN_SYNC, Waits.NO, reads=True, hides_topics=True)
    def min_offset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic, queue = self._queue(request)
        return _offset(request, self._tiered.min_offset(topic, queue))

    @BrokerRoute(
        Code.SEARCH_OFFSET_BY_TIMESTAMP, of_topic(PUB | SUB | GET), IN_SYNC, Waits.NO, reads=True, hides_topics=True
    )
    async def search_offset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic, queue = self._queue(request)
        upper = request.ext.get("boundaryType", "LOWER").upper() == "UPPER"
        timestamp = require_int(request.ext, "timestamp")
        return _offset(request, await self._tiered.offset_by_time(topic, queue, timestamp, upper))

    @BrokerRoute(
        Code.GET_EARLIEST_MSG_STORETIME, of_topic(PUB | SUB | GET), IN_SYNC, Waits.NO, reads=True, hides_topics=True
    )
    async def earliest_store_time(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic, queue = self._queue(request)
        time = await self._tiered.store_time(topic, queue, self._tiered.min_offset(topic, queue))
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext={"timestamp": str(time)})

    @staticmethod
    def _queue(request: RemotingCommand) -> tuple[str, int]:
        """Return the topic and queue; unknown ones are accepted, and have offset 0."""
        topic, queue = require_str(request.ext, "topic"), require_int(request.ext, "queueId")
        if names.topic_fault(topic) is not None or not 0 <= queue < 1 << 31:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"topic {topic!r}, queueId {queue}")
        return topic, queue


def _offset(request: RemotingCommand, offset: int) -> RemotingCommand:
    return RemotingCommand.response(request, ResponseCode.SUCCESS, ext={"offset": str(max(offset, 0))})
