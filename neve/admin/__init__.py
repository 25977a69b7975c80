"""Administration of a RocketMQ cluster: topics, consumer groups, brokers, broker sets, users and policies.

    async with neve.admin.connect("127.0.0.1:9876") as admin:
        for group in await admin.groups.settings():
            print(group, total_lag(await admin.groups.progress(group)))

The request codes are Apache RocketMQ's, so every method works with its servers, except where it names a difference.

    admin.py          `ClusterAdmin`, and `connect`, which opens it
    requests.py       one request to a broker, to all brokers, or to a name server
    topics.py         settings, offsets and lists of topics
    groups.py         settings, members and progress of consumer groups
    brokers.py        configuration, runtime figures and write permission of brokers
    users.py          users and policies of all servers together
    broker_sets.py    broker sets, through their controllers
    lag.py, offset_reset.py, drain.py, migration.py    results that are computed from their answers

The names below are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neve.admin.admin import ClusterAdmin, connect
    from neve.admin.broker_sets import BrokerSets, connect_controllers
    from neve.admin.errors import AdminError, Conflict, NotFound, NotPermitted, Unreachable
    from neve.admin.groups import Groups

_HOMES = {
    "ClusterAdmin": "neve.admin.admin",
    "AdminError": "neve.admin.errors",
    "BrokerSets": "neve.admin.broker_sets",
    "Conflict": "neve.admin.errors",
    "Groups": "neve.admin.groups",
    "NotFound": "neve.admin.errors",
    "NotPermitted": "neve.admin.errors",
    "Unreachable": "neve.admin.errors",
    "connect": "neve.admin.admin",
    "connect_controllers": "neve.admin.broker_sets",
}

__all__ = [
    "AdminError",
    "BrokerSets",
    "ClusterAdmin",
    "Conflict",
    "Groups",
    "NotFound",
    "NotPermitted",
    "Unreachable",
    "connect",
    "connect_controllers",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'neve.admin' has no attribute {name!r}")
    return getattr(import_module(home), name)
