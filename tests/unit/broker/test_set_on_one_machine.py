"""Processes of a broker set on one machine, before their start."""

from __future__ import annotations

from itertools import count, repeat
from pathlib import Path

import pytest

from broker import set_on_one_machine


def test_members_have_distinct_ports_even_if_a_free_port_is_found_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (port for number in count(20_000) for port in repeat(number, 2))
    monkeypatch.setattr(set_on_one_machine, "free_port", lambda address: next(found))
    ports = set_on_one_machine._ports_of(set_on_one_machine.Places(Path("data"), 0, 0, 0), 3)
    assert len({port for of_member in ports for port in of_member}) == 9
