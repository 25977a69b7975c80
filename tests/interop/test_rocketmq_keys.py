"""Each key of the configuration classes in Apache's own jars is in neve's table, with Apache's default."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench import jvm
from broker.config import BrokerConfig
from controller.controller_config import ControllerConfig
from infra.config import rocketmq_keys
from infra.config.properties import parse_properties, to_properties
from namesrv.namesrv_config import NamesrvConfig

pytestmark = pytest.mark.servers

_S = 120.0
_SOURCES = Path(__file__).parent / "java_keys"
#: By RocketMQ's class, its headings in the table: its own and those that it inherits or shares.
CLASSES = {
    "org.apache.rocketmq.common.BrokerConfig": ("BrokerConfig", "BrokerIdentity"),
    "org.apache.rocketmq.store.config.MessageStoreConfig": ("MessageStoreConfig",),
    "org.apache.rocketmq.remoting.netty.NettyServerConfig": ("NettyServerConfig",),
    "org.apache.rocketmq.remoting.netty.NettyClientConfig": ("NettyClientConfig",),
    "org.apache.rocketmq.auth.config.AuthConfig": ("AuthConfig",),
    "org.apache.rocketmq.tieredstore.MessageStoreConfig":
        ("tieredstore.MessageStoreConfig", "MessageStoreConfig", "BrokerIdentity"),
    "org.apache.rocketmq.common.namesrv.NamesrvConfig": ("NamesrvConfig",),
    "org.apache.rocketmq.common.ControllerConfig": ("ControllerConfig", "a controller's ControllerConfig"),
    "org.apache.rocketmq.common.JraftConfig": ("JraftConfig",),
}  # fmt: skip
#: Keys whose default in RocketMQ's classes differs from the effective one, which comes from its start script, the
#: machine or paths.
FROM_ELSEWHERE = {"listenPort", "brokerIP1", "brokerName", "storePathRootDir", "kvConfigPath"}


class Key(NamedTuple):
    """A key of RocketMQ's configuration."""

    settable: bool
    default: str


def told(home: Path) -> dict[str, dict[str, Key]]:
    """Return the keys by class and name."""
    command = jvm.java(jvm.classes(_SOURCES), "Keys", *CLASSES, home=home)
    done = subprocess.run(command, capture_output=True, text=True, timeout=_S, check=True)
    found: dict[str, dict[str, Key]] = {name: {} for name in CLASSES}
    for line in done.stdout.splitlines():
        row = line.split("\t")
        if len(row) == 4:  # Other keys belong to its logging.
            found[row[0]][row[1]] = Key(row[2] == "true", "" if row[3] == "null" else row[3])
    return found


@pytest.fixture(scope="module")
def apaches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Key]]:
    return told(tmp_path_factory.mktemp("keys"))


def test_table_has_exactly_the_keys_of_each_class(apaches: dict[str, dict[str, Key]]) -> None:
    assert len({name for keys in apaches.values() for name in keys}) > 450
    for name, headings in CLASSES.items():
        own = rocketmq_keys.keys(headings[:1])
        here = rocketmq_keys.keys(headings)
        assert apaches[name].keys() - here.keys() == set(), f"{name}: keys that the table lacks"
        assert own.keys() - apaches[name].keys() == set(), f"{name}: keys that it does not have"
        for key, there in apaches[name].items():
            assert there.settable == (here[key].reason != "no-setter"), f"{name}: {key}"


def test_values_accepted_without_warning_are_rocketmq_defaults(apaches: dict[str, dict[str, Key]]) -> None:
    looked_at = 0
    for name, headings in CLASSES.items():
        for key, one in rocketmq_keys.keys(headings[:1]).items():
            there = apaches[name][key].default
            if one.reason == "refused" and there:
                assert there in rocketmq_keys.REFUSED[key].harmless, f"{name}: {key}={there} would be refused"
            elif one.reason in rocketmq_keys.REASONS and one.default is not None and there:
                assert one.default == there, f"{name}: {key}"
                looked_at += 1
    assert looked_at > 350


@pytest.mark.parametrize(
    ("kind", "classes"),
    [
        (BrokerConfig, rocketmq_keys.BROKER),
        (NamesrvConfig, rocketmq_keys.NAMESRV),
        (ControllerConfig, rocketmq_keys.CONTROLLER),
    ],
)
def test_honoured_keys_have_rocketmq_defaults_or_a_documented_difference(
    apaches: dict[str, dict[str, Key]], kind: type[Any], classes: tuple[str, ...]
) -> None:
    own = {name: value for _, name, value in parse_properties(to_properties(kind()), "")}
    told_of = rocketmq_keys.OTHER_DEFAULTS[kind.__name__]
    others: dict[str, str] = {}
    for key, one in rocketmq_keys.keys(classes).items():
        if one.reason != rocketmq_keys.HONOURED or key in FROM_ELSEWHERE or key not in own:
            continue
        theirs = {keys[key].default for name, keys in apaches.items() if key in keys
                  and {*CLASSES[name]} & {*one.classes}}  # fmt: skip
        if theirs and own[key] not in theirs:
            (others[key],) = theirs
    assert others == {key: other.theirs for key, other in told_of.items() if key not in FROM_ELSEWHERE}
