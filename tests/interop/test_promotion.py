"""A neve slave replaces its Apache master, which is retired: no message is lost or duplicated."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import jvm
from bench.wire import Client
from tests.interop.in_flight import InFlight
from tests.interop.promoted import apache_and_slave
from tests.interop.steady import TOPIC as STEADY
from tests.interop.steady import Steady, assert_each_offset_once_acknowledged_and_consumed

pytestmark = pytest.mark.servers


def test_messages_in_flight_at_the_master_survive_a_promotion(tmp_path: Path) -> None:
    with apache_and_slave(tmp_path) as pair:
        in_flight = InFlight(pair.master.broker)
        pair.has_all()
        in_flight.more_before_the_end()
        pair.has_log()
        in_flight.assert_is_on_its_way()
        pair.master.kill()
        with pair.promoted() as broker:
            in_flight.assert_goes_on_at(broker)


def test_running_stock_consumer_misses_no_message_in_a_promotion(tmp_path: Path) -> None:
    with apache_and_slave(tmp_path) as pair:
        with Client(pair.master.broker) as client:
            client.create_topic(STEADY, 2)
        with Steady(pair.namesrv, jvm.SERVER, tmp_path / "clients") as clients:
            clients.send_more(["stock"])
            pair.has_all()
            clients.send_more(["stock"])
            pair.has_log()
            pair.master.stop()
            with pair.promoted():
                clients.send_more(["stock"], 2 * 30)
                clients.stop_sending()
                clients.drained("stock")
        assert_each_offset_once_acknowledged_and_consumed(clients.acked, clients.got)
