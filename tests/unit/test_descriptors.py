"""Tests of the descriptor budget: the share of each part, and their sum."""

import pytest

from infra.net.limits import Admission
from infra.process.descriptors import budget


@pytest.mark.parametrize("open_files", [128, 200, 256, 512, 1024, 4096, 65_536, 1 << 20])
@pytest.mark.parametrize("mappings", [0, 4096, 65_530, 1 << 20])
@pytest.mark.parametrize("log", [4, 40, 4000])
def test_descriptor_budget_is_not_exceeded(open_files: int, mappings: int, log: int) -> None:
    given = budget(open_files, mappings)
    connections = given.connections(log)
    assert connections >= 0
    assert given.queue_files >= 1
    assert given.cold_groups >= 1
    if connections:
        assert given.queue_files + given.cold_groups + log + connections + given.reserve <= open_files
    assert given.queue_files + given.cold_groups <= max(2, mappings // 2)
    assert given.accepts + 32 <= given.reserve


def test_usual_descriptor_limit_fits_all_connections_and_years_of_log() -> None:
    given = budget(65_536, 65_530)
    assert (given.queue_files, given.cold_groups) == (8192, 1024)
    assert given.connections(log=2 * 10_000) > 10_000
    assert 250 < budget(1024, 65_530).connections(log=6) < 400


def test_connection_above_the_limit_is_refused_and_counted() -> None:
    room = 3
    admission = Admission(10, lambda: room)
    assert [admission.admits(("h", 1), count) for count in range(5)] == [True, True, True, False, False]
    room = 5
    assert admission.admits(("h", 1), 4)
    assert (admission.most, admission.refused) == (5, 2)
    with_tls = Admission(100, None, with_tls=True)
    assert (with_tls.most, with_tls.undecided) == (75, 25)
