"""Weeks of a broker whose topics are created and deleted: no figure grows without bound.

`make year` simulates a year with many topics.
"""

from __future__ import annotations

import msgspec
import pytest

from neve.archive.catalog.journal_reader import read_catalog
from tests.simulation.process import BROKER
from tests.simulation.year.figures import DayFigures, growing, memory_of
from tests.simulation.year.world import SMALL, YearWorld


def test_figures_stay_bounded_and_the_archive_is_complete() -> None:
    world = YearWorld(SMALL)
    try:
        days = list(world.run())
        assert world.verify().problems == []
        assert world.verify().objects > SMALL.topics, "too little is left to have been verified"
        assert world.orphans() == []
        assert min(one.waiting for one in days[7:]) > 0, "nothing expires"
        assert growing(days, SMALL.slack) == []
        assert world.lost() == []
        some = next(read_catalog(world.bucket, BROKER).each_object()).key
        del world.bucket.objects[some]
        assert world.verify().problems == [f"{some}: the object is missing"]
    finally:
        world.close()


@pytest.mark.parametrize("name", ["live", "catalog_memory", "entries"])
def test_growth_is_reported(name: str) -> None:
    steady = DayFigures(**dict.fromkeys(DayFigures.__struct_fields__, 1000) | {"requests": {"PUT": 1000}})  # type: ignore[arg-type]
    assert growing([steady] * 8) == []
    grown = msgspec.structs.replace(steady, **{name: 1100})
    (found,) = growing([steady] * 6 + [grown] * 2)
    assert found.startswith(f"{name}: 1,100")


def test_requests_in_proportion_to_traffic_are_not_growth() -> None:
    steady = DayFigures(**dict.fromkeys(DayFigures.__struct_fields__, 1000) | {"requests": {"PUT": 1000}})  # type: ignore[arg-type]
    more = msgspec.structs.replace(steady, requests={"PUT": 2000})
    assert growing([steady] * 6 + [more] * 2) == [
        "PUT requests a day: 2,000 in the last quarter, 1,000 in the one before"
    ]
    assert growing([steady] * 6 + [msgspec.structs.replace(more, messages=2000)] * 2) == []


def test_memory_of_an_object_includes_its_content() -> None:
    assert memory_of({"a": [b"x" * 10_000]}) > 10_000
