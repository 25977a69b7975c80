"""Tests that the files in conf/ name every key with its default, and start a server unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broker.config import BrokerConfig
from controller.controller_config import ControllerConfig
from infra.config.properties import live_keys, load, parse_properties, to_properties
from namesrv.namesrv_config import NamesrvConfig

CONF = Path(__file__).parents[2] / "conf"
FILES = [("broker.conf", BrokerConfig), ("namesrv.conf", NamesrvConfig), ("controller.conf", ControllerConfig)]
#: Keys that to_properties never shows.
SECRET = {"initAuthenticationUser": "", "innerClientAuthenticationCredentials": ""}
SECRETS = {"controller.conf": {"etcdPassword": ""}}


@pytest.mark.parametrize(("name", "kind"), FILES)
def test_example_file_shows_every_key_with_its_default(name: str, kind: type, tmp_path: Path) -> None:
    text = (CONF / name).read_text()
    load(kind, CONF / name)
    active = [key for _, key, _ in parse_properties(text, name)]
    shown = re.findall(r"^#?(\w+)=", text, re.MULTILINE)
    known = {key: value for _, key, value in parse_properties(to_properties(kind()), "defaults")} | SECRET
    known |= SECRETS.get(name, {})
    assert sorted(shown) == sorted(known), "each key once"
    defaults = tmp_path / name
    defaults.write_text("\n".join(re.findall(r"^#(\w+=.*)", text, re.MULTILINE)))
    assert load(kind, defaults) == kind(), "what is commented out is the default"
    assert len(active) < 10


@pytest.mark.parametrize(("name", "kind"), FILES)
def test_keys_marked_live_can_be_changed_live(name: str, kind: type) -> None:
    paragraphs = re.findall(r"((?:^# .*\n)*)((?:^#?\w+=.*\n)+)", (CONF / name).read_text(), re.MULTILINE)
    marked = {key for about, keys in paragraphs if "(live)" in about for key in re.findall(r"#?(\w+)=", keys)}
    assert sorted(marked) == sorted(live_keys(kind()))
