"""Which queues a member of a group reads. Every member computes it alone, from the same two sorted lists.

The results are those of the strategies in RocketMQ's `client/consumer/rebalance`, queue for queue and in their order:
Python and Java members may share a group. All members of a group must use the same one.

    average               AllocateMessageQueueAveragely
    circular              AllocateMessageQueueAveragelyByCircle
    by_config             AllocateMessageQueueByConfig
    machine_room          AllocateMessageQueueByMachineRoom
    machine_room_nearby   AllocateMachineRoomNearby
    consistent_hash       AllocateMessageQueueConsistentHash
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence

from neve.client.model import MessageQueue
from neve.errors import ClientError

#: (this member's client id, all members' client ids, all queues of a topic) -> this member's queues.
Allocation = Callable[[str, Sequence[str], Sequence[MessageQueue]], list[MessageQueue]]
VIRTUAL_NODES = 10


def average(client_id: str, members: Sequence[str], queues: Sequence[MessageQueue]) -> list[MessageQueue]:
    """Runs of neighbouring queues; the first members get one more when it does not divide."""
    members, queues = sorted(set(members)), sorted(queues)
    if client_id not in members:
        return []
    index = members.index(client_id)
    share, extra = divmod(len(queues), len(members))
    start = index * share + min(index, extra)
    return queues[start : start + share + (1 if index < extra else 0)]


def circular(client_id: str, members: Sequence[str], queues: Sequence[MessageQueue]) -> list[MessageQueue]:
    """Dealt out like cards."""
    members, queues = sorted(set(members)), sorted(queues)
    if client_id not in members:
        return []
    return queues[members.index(client_id) :: len(members)]


def by_config(mine: Iterable[MessageQueue]) -> Allocation:
    """These queues, whoever else is there: the operator sees to it that every queue has one reader."""
    fixed = list(mine)

    def allocate(_client_id: str, _members: Sequence[str], queues: Sequence[MessageQueue]) -> list[MessageQueue]:
        topics = {queue.topic for queue in queues}
        return [queue for queue in fixed if queue.topic in topics]  # a group may read several topics

    return allocate


def machine_room(rooms: Collection[str]) -> Allocation:
    """Only queues of brokers in these rooms; a broker's name is `room@name`. Each member gets a run of them."""
    allowed = frozenset(rooms)

    def allocate(client_id: str, members: Sequence[str], queues: Sequence[MessageQueue]) -> list[MessageQueue]:
        members = sorted(set(members))
        if client_id not in members:
            return []
        parts = [(queue, queue.broker_name.split("@")) for queue in sorted(queues)]
        ours = [queue for queue, name in parts if len(name) == 2 and name[0] in allowed]
        share, extra = divmod(len(ours), len(members))
        index = members.index(client_id)
        left_over = [ours[index + share * len(members)]] if index < extra else []
        return ours[index * share : (index + 1) * share] + left_over

    return allocate


def machine_room_nearby(
    within: Allocation, broker_room: Callable[[MessageQueue], str], client_room: Callable[[str], str]
) -> Allocation:
    """Queues stay in their room while it has a member; those of a room without one are shared by all.

    Args:
        within: how a room's queues are shared.
        broker_room: the room, or zone, of a queue.
        client_room: the room of a member, by its client id; choose an `instance_name` that tells it.
    """

    def room_of_queue(queue: MessageQueue) -> str:
        return _named(broker_room(queue), queue)

    def room_of_client(client_id: str) -> str:
        return _named(client_room(client_id), client_id)

    def allocate(client_id: str, members: Sequence[str], queues: Sequence[MessageQueue]) -> list[MessageQueue]:
        members = sorted(set(members))
        if client_id not in members:
            return []
        queues_by_room: dict[str, list[MessageQueue]] = {}
        for queue in sorted(queues):
            queues_by_room.setdefault(room_of_queue(queue), []).append(queue)
        members_by_room: dict[str, list[str]] = {}
        for member in members:
            members_by_room.setdefault(room_of_client(member), []).append(member)
        here = room_of_client(client_id)
        mine = within(client_id, members_by_room[here], queues_by_room.get(here, []))
        for room in sorted(queues_by_room.keys() - members_by_room.keys()):
            mine += within(client_id, members, queues_by_room[room])
        return mine

    return allocate


def consistent_hash(virtual_nodes: int = VIRTUAL_NODES) -> Allocation:
    """A queue goes to the member next on a ring of hashes: when a member comes or goes, few queues move."""
    if virtual_nodes < 1:
        raise ClientError(f"{virtual_nodes} virtual nodes: a member needs one to get a queue")

    def allocate(client_id: str, members: Sequence[str], queues: Sequence[MessageQueue]) -> list[MessageQueue]:
        members = sorted(set(members))
        if client_id not in members:
            return []
        ring = {_ring_hash(f"{member}-{node}"): member for member in members for node in range(virtual_nodes)}
        points = sorted(ring)

        def owner(queue: MessageQueue) -> str:
            at = bisect.bisect_left(points, _ring_hash(_java_text(queue)))
            return ring[points[at % len(points)]]

        return [queue for queue in sorted(queues) if owner(queue) == client_id]

    return allocate


def _ring_hash(key: str) -> int:
    """The first four bytes of the MD5."""
    return int.from_bytes(hashlib.md5(key.encode(), usedforsecurity=False).digest()[:4], "big")


def _java_text(queue: MessageQueue) -> str:
    return f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, queueId={queue.queue_id}]"


def _named(room: str, of: object) -> str:
    if not room:
        raise ClientError(f"no room is known of {of}")
    return room


ALLOCATIONS: dict[str, Allocation] = {
    "average": average,
    "circular": circular,
    "consistent_hash": consistent_hash(),
}


def chosen(allocation: str | Allocation) -> Allocation:
    """The allocation of that name, or the one given.

    Raises:
        ClientError: there is none of that name.
    """
    if not isinstance(allocation, str):
        return allocation
    found = ALLOCATIONS.get(allocation)
    if found is None:
        raise ClientError(f"no allocation {allocation!r}: there are {', '.join(ALLOCATIONS)}")
    return found
