"""Which of a cluster's topics are its users', and which the servers keep for themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neve.cli.failures import UNREACHABLE, Failure
from neve.remoting.names import is_system_topic

if TYPE_CHECKING:
    from collections.abc import Iterable

    from neve.client import AsyncClient
    from neve.client.model import BrokerInfo


async def topic_names(client: AsyncClient, everything: bool) -> list[str]:
    """The topics of the cluster; with `everything` the servers' own as well.

    A name server forgets the topics of a broker that is gone: an empty list would say that there are none.

    Raises:
        Failure: there is no broker.
    """
    names = await client.topic_list()
    brokers = (await client.cluster_info()).values()
    if not brokers:
        raise Failure(UNREACHABLE, "the name server knows no broker: none is up, or none was told its address")
    return names if everything else of_users(names, brokers)


def of_users(names: Iterable[str], brokers: Iterable[BrokerInfo]) -> list[str]:
    """Without the servers' own, and those of groups."""
    brokers = list(brokers)
    # each broker and cluster has topics of its own name
    own = {broker.name for broker in brokers} | {broker.cluster for broker in brokers}
    own |= {f"{broker.cluster}_REPLY_TOPIC" for broker in brokers}
    return [name for name in names if name not in own and not _is_systems(name)]


def _is_systems(name: str) -> bool:
    return is_system_topic(name) or name.startswith("%")
