"""Fixtures that run `neve up` like a user: in its own process, on free ports, with data in the test's directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.kit.server import spark_jvm
from tests.kit.server.neve import NeveServer


@pytest.fixture(scope="session", autouse=True)
def spark_for_seconds() -> Iterator[None]:
    """Let Spark's JVMs start soon, because each runs for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_SUBMIT_OPTS", spark_jvm.driver_options())
        yield


@pytest.fixture(scope="session")
def neve_up() -> Callable[..., AbstractContextManager[NeveServer]]:
    """Return a context manager that runs `neve up`.

    Use it as `with neve_up(tmp_path, "--set", "k=v") as neve:`. A second run in the same directory uses the same data.
    """
    return NeveServer


@pytest.fixture(scope="module")
def namesrv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of the module's name server: the one in NEVE_TEST_NAMESRV, or one that is started here."""
    outside = os.environ.get("NEVE_TEST_NAMESRV")
    if outside:
        yield outside
        return
    with NeveServer(tmp_path_factory.mktemp("neve")) as neve:
        yield neve.namesrv
