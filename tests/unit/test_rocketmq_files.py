"""Tests of configuration files written for RocketMQ: the treatment of each key, and its documentation."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from broker.broker_controller import BrokerController
from broker.config import BrokerConfig
from broker.machine import Machine
from controller.controller_config import ControllerConfig
from infra.clock import SystemClock
from infra.config import rocketmq_keys
from infra.config.properties import (
    ConfigError,
    live_keys,
    parse_properties,
    read,
    to_properties,
    update_live,
)
from infra.disk.filesystem import RealDisk
from infra.observe import log as logs
from namesrv.namesrv_config import NamesrvConfig
from neve.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "rocketmq-keys.md"
SERVERS = [
    (BrokerConfig, rocketmq_keys.BROKER, 300),
    (NamesrvConfig, rocketmq_keys.NAMESRV, 50),
    (ControllerConfig, rocketmq_keys.CONTROLLER, 40),
]
AnyConfig = type[BrokerConfig] | type[NamesrvConfig] | type[ControllerConfig]

#: A typical production file since 4.x, with settings recommended by several guides.
PRODUCTION = """
# broker-a of the east hall
brokerClusterName = east
brokerName = broker-a
brokerId = 0
namesrvAddr = {namesrv}
brokerIP1 = 127.0.0.1
brokerIP2 = 10.0.1.17
listenPort = 0
bindAddress = 127.0.0.1
haListenPort = 10922
brokerRole = ASYNC_MASTER
flushDiskType = ASYNC_FLUSH
deleteWhen = 04
fileReservedTime = 48
defaultTopicQueueNums = 4
autoCreateTopicEnable = false
autoCreateSubscriptionGroup = true
storePathRootDir = {root}
storePathCommitLog = {root}/commitlog
storePathConsumeQueue = {root}/consumequeue
storePathIndex = {root}/index
storeCheckpoint = {root}/checkpoint
abortFile = {root}/abort
mapedFileSizeCommitLog = 1048576
mapedFileSizeConsumeQueue = 300000
destroyMapedFileIntervalForcibly = 120000
redeleteHangedFileInterval = 120000
diskMaxUsedSpaceRatio = 88
maxMessageSize = 65536
flushCommitLogLeastPages = 4
flushConsumeQueueLeastPages = 2
flushCommitLogThoroughInterval = 10000
flushConsumeQueueThoroughInterval = 60000
checkTransactionMessageEnable = false
sendMessageThreadPoolNums = 128
pullMessageThreadPoolNums = 128
useReentrantLockWhenPutMessage = true
waitTimeMillsInSendQueue = 1000
osPageCacheBusyTimeOutMills = 5000
transientStorePoolEnable = true
transientStorePoolSize = 5
warmMapedFileEnable = true
maxTransferCountOnMessageInMemory = 1000
transferMsgByHeap = false
slaveReadEnable = true
serverSocketSndBufSize = 131072
serverSelectorThreads = 6
clusterTopicEnable = true
brokerTopicEnable = true
traceTopicEnable = true
enablePropertyFilter = true
messageDelayLevel = 1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h
adminPort = 0
"""


def written(home: Path, text: str, name: str = "broker.conf") -> Path:
    path = home / name
    path.write_text(text)
    return path


def faults(home: Path, text: str, kind: type = BrokerConfig) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(kind, written(home, text))
    return list(caught.value.faults)


async def test_rocketmq_production_file_starts_a_broker_with_warnings(tmp_path: Path) -> None:
    path = written(tmp_path, PRODUCTION.format(root=tmp_path / "store", namesrv="127.0.0.1:1"))
    loaded = read(BrokerConfig, path)
    config = loaded.config
    assert (config.mapped_file_size_commit_log, config.file_reserved_time, config.disk_max_used_space_ratio) == (
        1 << 20,
        48,
        88,
    )
    in_vain = {text.split(": ")[1].split()[0] for text in loaded.warnings}
    assert {"brokerIP2", "transientStorePoolEnable", "sendMessageThreadPoolNums"} <= in_vain
    assert "flushCommitLogLeastPages" not in in_vain, "RocketMQ's default asks for nothing"
    assert not in_vain & {"storePathCommitLog", "mapedFileSizeCommitLog", "fileReservedTime"}

    broker = BrokerController(config, Machine(clock=SystemClock(), disk=RealDisk()))
    await broker.start()
    try:
        assert broker.address[1] > 0
    finally:
        await broker.shutdown()


def test_keys_without_effect_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logs.configure("INFO", ["broker.conf:3: brokerIP2 has no effect: there is one copy"])
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert "WARNING neve broker.conf:3: brokerIP2 has no effect" in capsys.readouterr().err


def test_all_faults_of_a_file_are_reported_together(tmp_path: Path) -> None:
    told = faults(
        tmp_path,
        "brokerNmae=a\nlistenPort=x\nbrokerRole=SYNC_MASTER\nno value\n=\n"
        "fileReservedTime=48\nmapedFileSizeCommitlog=1g\n",
    )
    for (number, text), fault in zip(
        [
            (1, "unknown key brokerNmae; did you mean brokerName?"),
            (2, "listenPort=x: allowed: a whole number"),
            (3, "brokerRole=SYNC_MASTER is refused: there is one copy"),
            (4, "unknown key no"),
            (5, "is not key=value"),
            (7, "did you mean mapedFileSizeCommitLog?"),
        ],
        told,
        strict=True,
    ):
        assert f"broker.conf:{number}: " in fault
        assert text in fault
    shown = str(ConfigError(*told))
    assert shown.startswith("6 faults in the configuration:\n  ")


@pytest.mark.parametrize(
    ("line", "beside"),
    [
        ("brokerRole=SYNC_MASTER", ""),
        ("brokerId=1", "brokerRole=SLAVE"),
        ("aclEnable=true", "authenticationEnabled=true"),
        ("enableDLegerCommitLog=true", ""),
        ("enableControllerMode=true", ""),
        ("inSyncReplicas=2", ""),
        ("storePathCommitLog=/ssd/commitlog", "storePathRootDir=/ssd"),
        ("messageStorePlugIn=org.apache.rocketmq.tieredstore.TieredMessageStore", "storeUrl=dir:/archive"),
        ("useTLS=true", "tlsEnable=true"),
        ("authenticationProvider=com.example.Ours", ""),
        ("fetchNamesrvAddrByAddressServer=true", "namesrvAddr=127.0.0.1:9876"),
        ("enableLmq=true", ""),
    ],
)
def test_unsupported_guarantee_is_refused_without_its_replacement(tmp_path: Path, line: str, beside: str) -> None:
    assert f"{line} is refused: " in faults(tmp_path, f"{line}\n")[0]
    if beside:
        read(BrokerConfig, written(tmp_path, f"{line}\n{beside}\n"))


@pytest.mark.parametrize(("kind", "classes", "least"), SERVERS)
def test_rocketmq_defaults_are_accepted_without_warnings(
    kind: AnyConfig, classes: tuple[str, ...], least: int, tmp_path: Path
) -> None:
    lines = [f"{key.name}={key.default}" for key in rocketmq_keys.keys(classes).values() if key.reason in
             rocketmq_keys.REASONS and key.default is not None]  # fmt: skip
    lines += [
        f"{name}={rule.harmless[0].format(root='~/store')}"
        for name, rule in rocketmq_keys.REFUSED.items()
        if name in rocketmq_keys.keys(classes)
    ]
    loaded = read(kind, written(tmp_path, "\n".join(lines)))
    assert loaded.warnings == []
    assert loaded.config == kind()
    assert len(lines) > least


@pytest.mark.parametrize(("kind", "classes"), [server[:2] for server in SERVERS])
def test_each_rocketmq_key_is_honoured_ignored_or_refused(
    kind: AnyConfig, classes: tuple[str, ...], tmp_path: Path
) -> None:
    own = {name for _, name, _ in parse_properties(to_properties(kind()), "")}
    own |= {"initAuthenticationUser", "innerClientAuthenticationCredentials"}
    for name, key in rocketmq_keys.keys(classes).items():
        if key.reason == rocketmq_keys.HONOURED:
            assert rocketmq_keys.ALIASES.get(name, name) in own, name
        elif key.reason == "refused":
            assert f"{name}=elsewhere is refused" in faults(tmp_path, f"{name}=elsewhere", kind)[0]
        else:
            assert name not in own
            loaded = read(kind, written(tmp_path, f"{name}=elsewhere"))
            assert loaded.config == kind()
            assert f"broker.conf:1: {name} has no effect: " in loaded.warnings[0]


def test_key_without_effect_cannot_be_changed_live() -> None:
    config = BrokerConfig()
    with pytest.raises(ConfigError, match="sendMessageThreadPoolNums has no effect"):
        update_live(config, {"maxMessageSize": "1m", "sendMessageThreadPoolNums": "8"})
    assert config == BrokerConfig()
    assert "maxMessageSize" in live_keys(config)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("brokerName=a b", "a b"),
        ("  brokerName :a", "a"),
        ("brokerName a=b", "a=b"),
        ("brokerName=a\\\n   b", "ab"),
        ("broker\\u004eame=\\u00e9\\t\\x", "é\tx"),
        ("brokerName=a # no comment", "a # no comment"),
        ("! a comment\\\nbrokerName=a\\\\", "a\\"),
        ("brokerName=a\rlistenPort=1", "a"),
    ],
)
def test_properties_file_is_parsed_like_java(tmp_path: Path, line: str, value: str) -> None:
    config = read(BrokerConfig, written(tmp_path, line)).config
    assert config.broker_name == value
    again = read(BrokerConfig, written(tmp_path, to_properties(config))).config
    assert again == config


def test_doctor_checks_a_name_server_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = f"listenPort=0\nkvConfigPath={tmp_path}/kv/kvConfig.json\ndefaultThreadPoolNums=32\n"
    for name in ("namesrv.conf", "ns.properties"):
        assert main.run(["doctor", "-c", str(written(tmp_path, lines, name))]) == 0
        said = capsys.readouterr().out
        assert "a name server" in said
        assert "defaultThreadPoolNums has no effect: requests are answered on one loop" in said
    assert main.run(["doctor", "-c", str(written(tmp_path, lines + "supportActingMaster=true\nx=1\n", name))]) == 1
    said = capsys.readouterr().out
    assert "supportActingMaster=true is refused" in said
    assert "unknown key x" in said


def test_doctor_reports_each_key_of_an_apache_file_without_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (
        "brokerRole=SYNC_MASTER\nmapedFileSizeCommitLog=1m\nflushCommitLogLeastPages=4\ntransientStorePoolEnable=true\n"
        'objectStoreSecretKey=geheim\nmetricsGrpcExporterTarget=http://otel:4317\nadminPort=0\nx=1\ninitAuthenticationUser={"password":"geheim"}\n'
    )
    path = written(tmp_path, lines)
    command = ["doctor", "-c", str(path), "--keys", "-o", "json", "--set", "objectStoreAccessKey=geheim"]
    assert main.run(command) == 1
    said = capsys.readouterr()
    assert "geheim" not in said.out + said.err
    rows = {row["check"]: row for row in json.loads(said.out)}
    states = {name: row["state"] for name, row in rows.items()}
    given = ["brokerRole", "mapedFileSizeCommitLog", "flushCommitLogLeastPages", "transientStorePoolEnable",
             "objectStoreSecretKey", "metricsGrpcExporterTarget", "adminPort", "x", "initAuthenticationUser",
             "objectStoreAccessKey"]  # fmt: skip
    assert list(rows)[: len(given)] == given
    assert [name for name in given if states[name] == "fail"] == ["brokerRole", "x"]
    assert [name for name in given if states[name] == "warn"] == [
        "transientStorePoolEnable", "objectStoreSecretKey", "metricsGrpcExporterTarget", "objectStoreAccessKey"
    ]  # fmt: skip
    assert "instead: ASYNC_MASTER" in rows["brokerRole"]["found"]
    assert rows["mapedFileSizeCommitLog"]["found"].endswith(":2: honoured as mappedFileSizeCommitLog")
    assert "instead: metricsExporterType=PROM" in rows["metricsGrpcExporterTarget"]["found"]
    assert "not given: broker-a here, the machine's name in RocketMQ" in rows["brokerName"]["found"]
    assert main.run(["doctor", "--keys"]) == 2


def test_replacement_hints_name_existing_keys() -> None:
    every = rocketmq_keys.keys((*rocketmq_keys.BROKER, *rocketmq_keys.NAMESRV, *rocketmq_keys.CONTROLLER))
    own = {name for kind, _, _ in SERVERS for _, name, _ in parse_properties(to_properties(kind()), "")}
    own |= {"initAuthenticationUser"}
    for name, text in rocketmq_keys.INSTEAD.items():
        assert every[name].reason != rocketmq_keys.HONOURED, name
        named = set(re.findall(r"\b[a-z]+[A-Z]\w+", text)) - {"createUser", "createAcl"}
        assert named <= own, name


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names, key=str.lower))


def listed(every: Mapping[str, rocketmq_keys.Key]) -> list[str]:
    """Return the list of honoured keys and the table of ignored ones."""
    honoured = [name for name, key in every.items() if key.reason == rocketmq_keys.HONOURED]
    lines = [f"Honoured: {code(honoured)}.", "", "| ignored | why |", "|---|---|"]
    for reason, why in rocketmq_keys.REASONS.items():
        if ignored := [name for name, key in every.items() if key.reason == reason]:
            lines.append(f"| {code(ignored)} | {why} |")
    return lines


def rendered() -> str:
    """Return the section of the page, generated from the tables."""
    every = {**rocketmq_keys.keys(rocketmq_keys.NAMESRV), **rocketmq_keys.keys(rocketmq_keys.BROKER)}
    lines = listed(every)
    of_a_controller = rocketmq_keys.keys(rocketmq_keys.CONTROLLER[:1])
    lines += ["", "In a controller.conf, these keys have the following effect:", "", *listed(of_a_controller)]
    lines += ["", "| refused | unless it is | or this is set | why |", "|---|---|---|---|"]
    for name, rule in rocketmq_keys.REFUSED.items():
        harmless = ", ".join(f"`{text.replace('{root}', 'storePathRootDir')}`" if text else "empty"
                             for text in rule.harmless)  # fmt: skip
        lines.append(f"| `{name}` | {harmless} | {f'`{rule.unless}`' if rule.unless else ''} | {rule.why} |")
    lines += ["", "Replacements for keys whose purpose neve serves in another way:", ""]
    lines += ["| instead of | |", "|---|---|"]
    by_text: dict[str, list[str]] = {}
    for name, text in rocketmq_keys.INSTEAD.items():
        by_text.setdefault(text, []).append(name)
    lines += [f"| {code(names)} | {text} |" for text, names in by_text.items()]
    lines += ["", "If a file omits these keys, neve's default differs from RocketMQ's:", ""]
    lines += ["| file | key | neve | RocketMQ | why |", "|---|---|---|---|---|"]
    for kind, _, _ in SERVERS:
        own = {name: value for _, name, value in parse_properties(to_properties(kind()), "")}
        file = {"BrokerConfig": "broker", "NamesrvConfig": "namesrv", "ControllerConfig": "controller"}[kind.__name__]
        for name, other in rocketmq_keys.OTHER_DEFAULTS[kind.__name__].items():
            lines.append(f"| {file}.conf | `{name}` | {own[name]} | {other.theirs or 'empty'} | {other.why} |")
    return "\n".join(lines) + "\n"


def test_page_lists_each_rocketmq_key_and_its_treatment() -> None:
    assert PAGE.read_text("utf-8").endswith("\n\n" + rendered())
