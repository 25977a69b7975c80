"""Divides the queues of a topic among the members of a group. Every member computes its share from the same two lists.

The results equal those of RocketMQ's strategies in `client/consumer/rebalance`, in the same order, so Python and Java
members may share a group. All members of a group must use the same strategy.

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

#: Returns the queues of a member, from its client id, the client ids of all members, and all queues of a topic.
Allocation = Callable[[str, Sequence[str], Sequence[MessageQueue]], list[MessageQueue]]
VIRTUAL_NODES = 10


def average(client_id: str, members: Sequence[str], queues: Sequence[MessageQueue]) -> list[MessageQueue]:
    """Assign consecutive queues; if the division has a remainder, the first members get one more."""
    members, queues = sorted(set(members)), sorted(queues)
    if client_id not in members:
        return []
    index = members.index(client_id)
    share, extra = divmod(len(queues), len(members))
    start = index * share + min(index, extra)
    return queues[start : start + share + (1 if index < extra else 0)]


def circular(client_id: str, members: Sequence[str], queues: Sequence[MessageQueue]) -> list[MessageQueue]:
    """Assign queues round robin."""
    members, queues = sorted(set(members)), sorted(queues)
    if client_id not in members:
        return []
    return queues[members.index(client_id) :: len(members)]


def by_config(mine: Iterable[MessageQueue]) -> Allocation:
    """Assign fixed queues. The operator has to give every queue exactly one reader."""
    fixed = list(mine)

    def allocate(_client_id: str, _members: Sequence[str], queues: Sequence[MessageQueue]) -> list[MessageQueue]:
        topics = {queue.topic for queue in queues}
        return [queue for queue in fixed if queue.topic in topics]  # a group may read several topics

    return allocate


def machine_room(rooms: Collection[str]) -> Allocation:
    """Assign consecutive queues of the brokers in these rooms; the name of a broker is `room@name`."""
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
    """Assign the queues of a room to its members. All members share the queues of rooms without a member.

    Args:
        within: divides the queues of a room.
        broker_room: returns the room, or zone, of a queue.
        client_room: returns the room of a member from its client id, which ends with the `instance_name`.
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
    """Assign a queue to the next member on a hash ring: if a member joins or leaves, few queues move."""
    if virtual_nodes < 1:
        raise ClientError(f"virtual_nodes must be at least 1, got {virtual_nodes}")

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
    """Return the first four bytes of the MD5 hash."""
    return int.from_bytes(hashlib.md5(key.encode(), usedforsecurity=False).digest()[:4], "big")


def _java_text(queue: MessageQueue) -> str:
    return f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, queueId={queue.queue_id}]"


def _named(room: str, of: object) -> str:
    if not room:
        raise ClientError(f"the room of {of} is unknown")
    return room


ALLOCATIONS: dict[str, Allocation] = {
    "average": average,
    "circular": circular,
    "consistent_hash": consistent_hash(),
}


def chosen(allocation: str | Allocation) -> Allocation:
    """Return the allocation of this name, or the given function.

    Raises:
        ClientError: the name is unknown.
    """
    if not isinstance(allocation, str):
        return allocation
    found = ALLOCATIONS.get(allocation)
    if found is None:
        raise ClientError(f"unknown allocation {allocation!r}; known are {', '.join(ALLOCATIONS)}")
    return found
