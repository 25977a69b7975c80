"""Reasons for which a neve broker does not follow an Apache master that a controller elected."""

from __future__ import annotations

import pytest

from broker.ha.stock_master import unlike_stock_member
from tests.kit.broker.ha_session import hello

SETTINGS = {
    "brokerClusterName": hello().cluster,
    "brokerName": hello().broker_set,
    "brokerId": "0",
    "brokerRole": "SYNC_MASTER",
    "enableControllerMode": "true",
    "mappedFileSizeCommitLog": str(hello().mapped_file_size_commit_log),
    "messageDelayLevel": hello().message_delay_level,
    "allAckInSyncStateSet": "true",
    "timerWheelEnable": "false",
}


def test_master_of_the_same_set_and_log_format_is_accepted() -> None:
    assert unlike_stock_member(hello(), SETTINGS, waits=True) is None


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"brokerId": "2"}, "not the master yet"),
        ({"brokerRole": "SLAVE"}, "not the master yet"),
        ({"brokerName": "another"}, "brokerName"),
        ({"brokerClusterName": "another"}, "brokerClusterName"),
        ({"mappedFileSizeCommitLog": "1"}, "mappedFileSizeCommitLog"),
        ({"messageDelayLevel": "1s"}, "messageDelayLevel"),
        ({"enableDLegerCommitLog": "true"}, "enableDLegerCommitLog"),
        ({"timerWheelEnable": "true"}, "timerWheelEnable"),
        ({"allAckInSyncStateSet": "false"}, "allAckInSyncStateSet"),
    ],
)
def test_master_with_a_differing_setting_is_refused(changed: dict[str, str], why: str) -> None:
    fault = unlike_stock_member(hello(), SETTINGS | changed, waits=True)
    assert fault is not None
    assert why in fault.text


def test_master_that_confirms_alone_is_accepted_if_nothing_waits() -> None:
    assert unlike_stock_member(hello(), SETTINGS | {"allAckInSyncStateSet": "false"}, waits=False) is None
