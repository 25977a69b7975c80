"""The administration of the synchronous client."""

from __future__ import annotations

from neve.client import admin as asynchronous
from neve.client.sync.loop import Wrapper, waiting


class Admin(Wrapper):
    """Administers one cluster: see `neve.client.Admin`."""

    create_topic = waiting(asynchronous.Admin.create_topic)
    delete_topic = waiting(asynchronous.Admin.delete_topic)
    topic_config = waiting(asynchronous.Admin.topic_config)
    topic_route = waiting(asynchronous.Admin.topic_route)
    topic_list = waiting(asynchronous.Admin.topic_list)
    topic_stats = waiting(asynchronous.Admin.topic_stats)
    consume_stats = waiting(asynchronous.Admin.consume_stats)
    cluster_info = waiting(asynchronous.Admin.cluster_info)
    broker_config = waiting(asynchronous.Admin.broker_config)
    set_request_mode = waiting(asynchronous.Admin.set_request_mode)
    view_message = waiting(asynchronous.Admin.view_message)
    query_messages = waiting(asynchronous.Admin.query_messages)

    _inner: asynchronous.Admin
