"""`neve up` as a user starts it: its own process, ports that are free, its data below the test's directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.servers.neve import NeveServer


@pytest.fixture(scope="session", autouse=True)
def spark_for_seconds() -> Iterator[None]:
    """Spark's JVMs end here before an optimising compiler has paid for itself: it would cost a third of their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        yield


@pytest.fixture(scope="session")
def neve_up() -> Callable[..., AbstractContextManager[NeveServer]]:
    """`with neve_up(tmp_path, "--set", "k=v") as neve:`; the same directory again continues with the same data."""
    return NeveServer


@pytest.fixture(scope="module")
def namesrv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name server of a cluster for the whole module; NEVE_TEST_NAMESRV names one that is up already."""
    outside = os.environ.get("NEVE_TEST_NAMESRV")
    if outside:
        yield outside
        return
    with NeveServer(tmp_path_factory.mktemp("neve")) as neve:
        yield neve.namesrv
