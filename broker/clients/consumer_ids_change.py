"""Notifications to members of a group when its members or topics change, so that they rebalance their queues."""

from __future__ import annotations

from broker.clients.client_manager import ConsumerGroup
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from neve.remoting.codes import RequestCode
from neve.remoting.command import RemotingCommand


class ConsumerIdsChangeListener:
    """Notifies the members of groups, unless a group's settings disable it."""

    def __init__(self, groups: SubscriptionGroupManager) -> None:
        self._groups = groups

    def changed(self, info: ConsumerGroup) -> None:
        config = self._groups.groups.get(info.name)
        if config is not None and not config.notify_consumer_ids_changed_enable:
            return
        for connection in info.channels:
            connection.send_oneway(
                RemotingCommand(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, ext={"consumerGroup": info.name})
            )
