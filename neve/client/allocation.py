"""Which queues of a topic a member of a group reads. Every member computes it alone, from the same two sorted lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from neve.client.model import MessageQueue

Allocation = Callable[[str, Sequence[str], Sequence[MessageQueue]], list[MessageQueue]]


def average(client_id: str, members: Sequence[str], queues: Sequence[MessageQueue]) -> list[MessageQueue]:
    """Runs of neighbouring queues; the first members get one more when it does not divide (AVG of the Java client)."""
    members, queues = sorted(set(members)), sorted(queues)
    if client_id not in members:
        return []
    index = members.index(client_id)
    share, extra = divmod(len(queues), len(members))
    start = index * share + min(index, extra)
    return queues[start : start + share + (1 if index < extra else 0)]


def circular(client_id: str, members: Sequence[str], queues: Sequence[MessageQueue]) -> list[MessageQueue]:
    """Dealt out like cards (AVG_BY_CIRCLE of the Java client)."""
    members, queues = sorted(set(members)), sorted(queues)
    if client_id not in members:
        return []
    return queues[members.index(client_id) :: len(members)]


ALLOCATIONS: dict[str, Allocation] = {"average": average, "circular": circular}
