"""Errors for invalid input: one line names the input, the allowed values and the remedy; nothing is half started."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import boto3
import pytest
from obstore.exceptions import GenericError, NotFoundError

from broker.broker_controller import BrokerController
from broker.config import BrokerConfig
from broker.machine import Machine
from infra.clock import SystemClock
from infra.disk.filesystem import RealDisk, Room
from infra.objects.minio import Minio, create_bucket, running
from infra.objects.s3 import _profile_provider, _translate
from infra.objects.store import NoSuchBucket, NotFound, StoreUnavailable
from infra.process.startup import EXIT_ARCHIVE, EXIT_CONFIG, EXIT_DISK, EXIT_IN_USE, StartupError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from tests.kit.server.neve import NEVE, Serving, settings_as_options
from tests.kit.server.requests import ask

Up = Callable[..., AbstractContextManager[Any]]


def start(*arguments: str) -> tuple[int, str]:
    """Return the exit code and the output of a broker that must not start."""
    ended = subprocess.run([NEVE, "broker", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in ended.stderr, ended.stderr
    assert ended.stdout == ""
    return ended.returncode, ended.stderr.strip().splitlines()[-1]


def start_with_store(root: Path, url: str) -> tuple[int, str]:
    settings = (f"storePathRootDir={root}", f"storeUrl={url}", "listenPort=0", "adminPort=-1")
    sizes = ("--set", "mappedFileSizeCommitLog=64k")
    return start(*sizes, *(part for setting in settings for part in ("--set", setting)))


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("listenPrt=10911", ("broker.conf:3", "unknown key listenPrt")),
        ("listenport=10911", ("broker.conf:3", "unknown key listenport", "did you mean listenPort?")),
        ("listenPort=70000", ("broker.conf:3", "listenPort=70000", "from 0 to 65535")),
        ("listenPort=high", ("broker.conf:3", "listenPort=high", "from 0 to 65535")),
        ("flushDiskType=MAYBE", ("broker.conf:3", "flushDiskType=MAYBE", "ASYNC_FLUSH, SYNC_FLUSH")),
        ("autoCreateTopicEnable=1", ("broker.conf:3", "autoCreateTopicEnable=1", "allowed: true, false")),
        ("mappedFileSizeCommitLog=2g", ("broker.conf:3", "mappedFileSizeCommitLog=2g", "from 65536 to 1073741824")),
        ("just words", ("broker.conf:3", "unknown key just")),
        ("words", ("broker.conf:3", "'words' is not key=value")),
    ],
)
def test_invalid_configuration_line_is_rejected_by_number(tmp_path: Path, line: str, parts: tuple[str, ...]) -> None:
    path = tmp_path / "broker.conf"
    path.write_text(f"# mine\nbrokerName=b\n{line}\n")
    code, said = start("-c", str(path), "--set", f"storePathRootDir={tmp_path / 'data'}")
    assert code == EXIT_CONFIG
    assert [part for part in parts if part not in said] == [], said
    assert not (tmp_path / "data").exists()


def test_disk_too_small_for_a_segment_is_rejected(tmp_path: Path) -> None:
    class Crowded(RealDisk):
        def room(self, path: Path) -> Room:
            return Room(900 << 20, 100 << 20)

    settings = (f"storePathRootDir={tmp_path}", "mappedFileSizeCommitLog=64m", "listenPort=0", "adminPort=0")
    controller = BrokerController(BrokerConfig.load(None, settings), Machine(clock=SystemClock(), disk=Crowded()))
    with pytest.raises(StartupError, match="100 MiB free, 128 MiB needed; set mappedFileSizeCommitLog smaller") as told:
        asyncio.run(controller.start())
    assert told.value.exit_code == EXIT_DISK
    assert not (tmp_path / "commitlog").exists()


# ---- the object store of the archive


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://x", "storeUrl must be dir:PATH or s3://BUCKET/PREFIX"),
        ("s3://key:secret@bucket", "credentials don't belong in storeUrl"),
        ("s3://bucket?secret=x", "storeUrl knows only endpoint, region and multipartAbove, not secret"),
    ],
)
def test_invalid_store_url_is_rejected(tmp_path: Path, url: str, said: str) -> None:
    code, text = start_with_store(tmp_path, url)
    assert (code, said in text) == (EXIT_ARCHIVE, True), text


def test_store_path_that_is_a_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, text = start_with_store(tmp_path / "data", f"dir:{tmp_path / 'file'}")
    assert (code, text.endswith("/file is not a directory (not mounted?)")) == (EXIT_ARCHIVE, True), text


def test_uncreatable_data_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, text = start_with_store(tmp_path / "file" / "data", "")
    assert (code, "storePathRootDir=" in text, "Not a directory" in text) == (EXIT_DISK, True, True), text


def test_admin_port_in_use_is_reported_before_any_file_changes(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = start("--set", f"adminPort={port}", "--set", f"storePathRootDir={tmp_path / 'data'}", "--set",
                           "listenPort=0")  # fmt: skip
    assert (code, f"adminPort {port} on 127.0.0.1" in text) == (EXIT_IN_USE, True), text
    assert not (tmp_path / "data").exists()


def test_unreachable_store_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    code, text = start_with_store(tmp_path, "s3://bucket?endpoint=http://127.0.0.1:9&region=x")
    assert (code, "http://127.0.0.1:9" in text, "PUT" in text) == (EXIT_ARCHIVE, True, True), text
    assert text.endswith("Connection refused"), text
    assert "retries" not in text


def test_missing_credentials_are_reported() -> None:
    """Without credentials the library asks for the machine's role, and its error does not say what is missing."""
    said = GenericError(
        "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 3ms - Forbidden"
    )
    told = _translate(said, "key", writing=True)
    assert isinstance(told, StoreUnavailable)
    assert "no credentials: AWS_ACCESS_KEY_ID" in str(told)


def test_missing_bucket_is_not_mistaken_for_the_end_of_a_journal() -> None:
    answer = "Object at location k not found: 404 Not Found: <Error><Code>{}</Code></Error>"
    assert isinstance(_translate(NotFoundError(answer.format("NoSuchBucket")), "k"), NoSuchBucket)
    assert isinstance(_translate(NotFoundError(answer.format("NoSuchKey")), "k/NoSuchBucket"), NotFound)


def test_default_profile_is_used_without_being_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    assert _profile_provider() is None
    (tmp_path / "credentials").write_text("[other]\naws_access_key_id = o\naws_secret_access_key = s\n")
    assert _profile_provider() is None
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = mine\naws_secret_access_key = s\n")
    assert _profile_provider()()["access_key_id"] == "mine"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Minio]:
    with running(tmp_path_factory.mktemp("minio")) as instance:
        create_bucket(instance, "archive")
        yield instance


@pytest.mark.servers
def test_missing_bucket_is_reported(tmp_path: Path, server: Minio, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    url = server.url("nowhere")
    code, text = start_with_store(tmp_path, url)
    assert (code, text) == (EXIT_ARCHIVE, f"neve: archive {url}: the bucket does not exist: create it")


@pytest.mark.servers
@pytest.mark.parametrize(
    ("lacking", "call"),
    [
        ("s3:PutObject", "PUT was refused"),
        ("s3:GetObject", "GET was refused"),
        ("s3:DeleteObject", "DELETE left the object"),
        ("s3:ListBucket", "LIST was refused"),
    ],
)
def test_missing_permission_is_reported(
    tmp_path: Path, server: Minio, monkeypatch: pytest.MonkeyPatch, lacking: str, call: str
) -> None:
    policy = {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Action": ["s3:*"], "Resource": ["arn:aws:s3:::*"]},
            {"Effect": "Deny", "Action": [lacking], "Resource": ["arn:aws:s3:::*"]},
        ],
    }
    client = boto3.client(
        "sts",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
    )
    lent = client.assume_role(RoleArn="arn:x:ignored:by:minio", RoleSessionName="lent", Policy=json.dumps(policy))
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", lent["Credentials"]["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", lent["Credentials"]["SecretAccessKey"])
    monkeypatch.setenv("AWS_SESSION_TOKEN", lent["Credentials"]["SessionToken"])
    code, text = start_with_store(tmp_path, server.url("archive", lacking.partition(":")[2]))
    assert (code, call in text, lacking in text) == (EXIT_ARCHIVE, True, True), text


# ---- over the wire


def topic(name: str, attributes: str = "") -> tuple[int, dict[str, str], bytes]:
    ext = {
        "topic": name, "defaultTopic": "TBW102", "readQueueNums": "4", "writeQueueNums": "4", "perm": "6",
        "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false", "attributes": attributes,
    }  # fmt: skip
    return Code.UPDATE_AND_CREATE_TOPIC, ext, b""


def group(name: str) -> tuple[int, dict[str, str], bytes]:
    return Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, json.dumps({"groupName": name}).encode()


def test_invalid_names_and_ttls_are_rejected_over_the_wire(tmp_path: Path, neve_up: Up) -> None:
    with neve_up(tmp_path, "--set", "mappedFileSizeCommitLog=64k") as neve:
        wrong = {
            "a b": "illegal characters",
            "a/b": "illegal characters",
            "ä": "illegal characters",
            "t" * 128: "longer than topic max length 127",
            " ": "blank",
        }
        for name, said in wrong.items():
            (answer,) = ask(neve, topic(name))
            assert (answer.code != 0, said in (answer.remark or "")) == (True, True), (name, answer.remark)
        for name, said in {"a b": "illegal characters", "g" * 121: "longer than group max length 120"}.items():
            (answer,) = ask(neve, group(name))
            assert (answer.code != 0, said in (answer.remark or "")) == (True, True), (name, answer.remark)
        for hours, said in {
            "1.5": "whole hours",
            "90m": "whole hours",
            "0": "whole hours from 1",
            "-2": "whole hours from 1",
        }.items():
            (answer,) = ask(neve, topic("orders", f"+reserve.time={hours}"))
            assert answer.code != ResponseCode.SUCCESS, hours
            assert f"reserve.time={hours}" in (answer.remark or ""), answer.remark
            assert said in (answer.remark or ""), answer.remark
        ok = ask(neve, topic("t" * 127), group("g" * 120), topic("orders", "+reserve.time=720"))
        assert [answer.code for answer in ok] == [0, 0, 0]


@pytest.mark.parametrize(("ttl", "said"), [("90m", "the nearest are 1h and 2h"), ("0", "0"), ("soon", "soon")])
def test_invalid_ttl_on_the_command_line_is_rejected(ttl: str, said: str) -> None:
    command = [NEVE, "topic", "ttl", "set", "orders", ttl, "--namesrv", "127.0.0.1:9"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, said in ended.stderr) == (2, True), ended.stderr
    assert "Traceback" not in ended.stderr


def test_broker_survives_more_queues_than_open_files(tmp_path: Path) -> None:
    """Each queue has a file. If the process may not open all of them at once, the broker opens them in turn."""
    settings = {"storePathRootDir": tmp_path / "data", "listenPort": 0, "adminPort": -1, "brokerIP1": "127.0.0.1"}
    options = settings_as_options(settings | {"mappedFileSizeCommitLog": "1m"})
    body = {"topic": "t", "defaultTopic": "TBW102", "defaultTopicQueueNums": "4", "readQueueNums": "300",
            "writeQueueNums": "300", "perm": "6", "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0",
            "order": "false"}  # fmt: skip
    message = {"producerGroup": "p", "topic": "t", "defaultTopic": "TBW102", "defaultTopicQueueNums": "4",
               "sysFlag": "0", "bornTimestamp": "1", "flag": "0"}  # fmt: skip
    sends = [(Code.SEND_MESSAGE, {**message, "queueId": str(queue)}, b"x") for queue in range(300)]
    with Serving(tmp_path, "broker", *options, open_files=200) as broker:
        answers = ask(broker, (Code.UPDATE_AND_CREATE_TOPIC, body, b""), *sends)
        assert {answer.code for answer in answers} == {0}
        assert broker.stop() == 0


def test_server_notifies_systemd_when_ready(tmp_path: Path) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(address))
        heard.settimeout(30)
        command = [NEVE, "namesrv", "--set", "listenPort=0", "--set", f"kvConfigPath={tmp_path / 'kv.json'}"]
        environment = {**os.environ, "NOTIFY_SOCKET": str(address)}
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        ) as process:
            try:
                assert heard.recv(100) == b"READY=1"
            finally:
                process.terminate()
            assert process.wait(60) == 0


def test_server_raises_its_open_file_limit_to_the_maximum(tmp_path: Path) -> None:
    settings = {"listenPort": 0, "kvConfigPath": tmp_path / "kv.json"}
    with Serving(tmp_path, "namesrv", *settings_as_options(settings), open_files=256, soft=True) as server:
        (limits,) = [
            line for line in Path(f"/proc/{server.process.pid}/limits").read_text().splitlines() if "open files" in line
        ]
        assert server.stop() == 0
    soft, hard = limits.split()[3:5]
    assert soft == hard != "256"


def test_name_server_rejects_unknown_key_and_stops_on_first_signal(tmp_path: Path) -> None:
    wrong = subprocess.run([NEVE, "namesrv", "--set", "listenPrt=1"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, "unknown key listenPrt" in wrong.stderr) == (EXIT_CONFIG, True), wrong.stderr
    settings = {"listenPort": 0, "kvConfigPath": tmp_path / "kv.json"}
    with Serving(tmp_path, "namesrv", *settings_as_options(settings)) as server:
        assert server.namesrv.startswith("0.0.0.0:")
        assert server.stop() == 0
