"""docs/deploy/object-storage.md: its IAM policies permit exactly the work of a broker and of a reader.

MinIO evaluates the policies: each test takes temporary credentials (STS AssumeRole) that have exactly such a policy.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import boto3
import pytest

import neve.archive
from infra.objects import minio
from infra.objects.doctor import check_store
from infra.objects.open import open_store
from infra.objects.s3 import MULTIPART_ABOVE
from infra.objects.s3_server import S3Server
from infra.objects.store import AccessDenied, ObjectStoreError
from neve.archive.read.topic_dataset import open_files
from neve.archive.store.url import MULTIPART_ABOVE_MAX, MULTIPART_ABOVE_MIN
from neve.cli.checks import FAIL, OK
from neve.client import sync
from neve.record.bodies import inflate
from tests.kit.clock.waiting import wait_until
from tests.kit.docs.page import Page, shell
from tests.kit.server.neve import NeveServer

pytestmark = pytest.mark.servers
PAGE = Page("deploy/object-storage.md")
BUCKET, PREFIX = "archive", "neve"
LARGE = f"&multipartAbove={MULTIPART_ABOVE_MIN}"
MESSAGES, BYTES = 8, 1 << 20

Policy = dict[str, Any]


def policy(heading: str) -> Policy:
    found: Policy = json.loads(PAGE.blocks(heading, "json")[0])
    return found


BROKER = policy("IAM policy of a broker")
READER = policy("IAM policy of a reader")


def restricted(full: Policy) -> Policy:
    """Return the policy with the page's statement for listings of the prefix only."""
    (listing,) = map(json.loads, PAGE.blocks("Restrict listings to the prefix", "json"))
    return {**full, "Statement": [*without(full, "s3:ListBucket")["Statement"], listing]}


def without(full: Policy, right: str) -> Policy:
    statements = [{**one, "Action": [name for name in actions(one) if name != right]} for one in full["Statement"]]
    return {**full, "Statement": [one for one in statements if one["Action"]]}


def actions(statement: Mapping[str, Any]) -> list[str]:
    found = statement["Action"]
    return [found] if isinstance(found, str) else list(found)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with minio.running(tmp_path_factory.mktemp("minio")) as instance:
        minio.create_bucket(instance, BUCKET)
        yield instance


def client(server: S3Server, service: str) -> Any:
    return boto3.client(
        service, endpoint_url=server.endpoint, region_name="us-east-1",
        aws_access_key_id=server.access_key, aws_secret_access_key=server.secret_key,
    )  # fmt: skip


def credentials(server: S3Server, allowed: Policy) -> dict[str, str]:
    """Return the environment with credentials that have this policy and nothing else."""
    role = {"RoleArn": "arn:aws:iam::000000000000:role/neve", "RoleSessionName": "neve"}
    found = client(server, "sts").assume_role(**role, Policy=json.dumps(allowed))["Credentials"]
    return {
        "AWS_ACCESS_KEY_ID": found["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": found["SecretAccessKey"],
        "AWS_SESSION_TOKEN": found["SessionToken"],
    }


@pytest.fixture
def become(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[Policy], dict[str, str]]:
    """Return a function that gives this process the credentials with a policy."""

    def become(allowed: Policy) -> dict[str, str]:
        env = credentials(server, allowed)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        return env

    return become


def parquet_objects(server: S3Server) -> dict[str, str]:
    """Return the etag of each object of the topic."""
    listed = client(server, "s3").list_objects_v2(Bucket=BUCKET, Prefix=f"{PREFIX}/topic=orders/")
    return {one["Key"]: one["ETag"].strip('"') for one in listed.get("Contents", ())}


@pytest.fixture(scope="module")
def archived(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Let a broker with the page's policy archive, upload in parts, compact, delete and read; return the bodies."""
    rest = random.Random(7)
    bodies = [rest.randbytes(BYTES) for _ in range(2 * MESSAGES)]
    settings = {"archiveReplacedGrace": 0, "mappedFileSizeCommitLog": "64m"}
    url = server.url(BUCKET, PREFIX) + LARGE
    broker = NeveServer(tmp_path_factory.mktemp("broker"), store=url, settings=settings)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in credentials(server, BROKER).items():
            patch.setenv(name, value)
        with broker as neve, sync.connect(neve.namesrv) as producer:
            producer.admin.create_topic("orders", queues=1)
            for start in (0, MESSAGES):
                for body in bodies[start : start + MESSAGES]:
                    producer.send("orders", body)
                assert neve.post("/archive/offload?roll&evict")[-1]["failed"] == 0
            before = parquet_objects(server)
            assert len(before) == 2
            assert all(etag.endswith("-2") for etag in before.values()), "uploaded in two parts"
            assert neve.post("/archive/compact?topic=orders")[-1]["event"] == "done"

            def is_deleted() -> bool:
                neve.post("/jobs/ttl/run")
                return not before.keys() & parquet_objects(server).keys()

            # The store's clock counts seconds.
            wait_until(is_deleted, "the old objects are deleted", 30)
            assert len(parquet_objects(server)) == 1
            read = neve.metric("neve_cold_fetches_total")
            found = shell("neve consume orders --count 16 -o json --body base64", broker.directory,
                          {"NAMESRV_ADDR": neve.namesrv})  # fmt: skip
            assert len([line for line in found if line.startswith("{")]) == 2 * MESSAGES
            assert neve.metric("neve_cold_fetches_total") > read
        assert "AccessDenied" not in broker.log()
    return bodies


def test_broker_policy_permits_all_work_of_a_broker(archived: list[bytes]) -> None:
    assert len(archived) == 2 * MESSAGES


@pytest.mark.parametrize("shape", [lambda full: full, restricted], ids=["bucket", "prefix"])
def test_reader_policy_permits_reads_and_refuses_writes(
    shape: Callable[[Policy], Policy], archived: list[bytes], server: S3Server, become: Any, tmp_path: Path
) -> None:
    env = become(shape(READER))
    url = server.url(BUCKET, PREFIX)
    records = neve.archive.open(url).topic("orders").read(0)
    assert [inflate(bytes(record.body), record.sys_flag) for record in records] == archived
    files, root = open_files(url)
    (key,) = parquet_objects(server)
    with files.open_input_file(f"{root}{key.removeprefix(f'{PREFIX}/')}") as opened:
        assert opened.read(4) == b"PAR1"
    for command in ("neve archive list", "neve archive verify --deep", "neve archive journal"):
        shell(f"{command} --store '{url}'", tmp_path, env)
    store = open_store(url)
    with pytest.raises(AccessDenied):
        store.put("new", b"1")
    with pytest.raises(ObjectStoreError, match="AccessDenied"):
        store.delete(key.removeprefix(f"{PREFIX}/"))
    assert list(parquet_objects(server)) == [key]


def test_reader_of_one_topic_reads_no_other(archived: list[bytes], server: S3Server, become: Any) -> None:
    resources = json.loads(PAGE.blocks("IAM policy of a reader", "json")[1])
    first, *others = READER["Statement"]
    become({**READER, "Statement": [{**first, "Resource": resources}, *others]})
    topic = neve.archive.open(server.url(BUCKET, PREFIX)).topic("orders")
    assert len(list(topic.read_raw(0))) == len(archived)
    client(server, "s3").put_object(Bucket=BUCKET, Key=f"{PREFIX}/topic=other/x.parquet", Body=b"1")
    with pytest.raises(AccessDenied):
        open_store(server.url(BUCKET, PREFIX)).get("topic=other/x.parquet")


def without_seconds(line: str) -> str:
    return re.sub(r"\d+ s apart", "some s apart", line)


@pytest.mark.parametrize("shape", [lambda full: full, restricted], ids=["bucket", "prefix"])
def test_doctor_accepts_the_broker_policy(
    shape: Callable[[Policy], Policy], server: S3Server, become: Any, tmp_path: Path
) -> None:
    env = become(shape(BROKER))
    (step,) = PAGE.steps("Check the rights")
    url = server.url(BUCKET, PREFIX)
    printed = shell(step.command.replace("s3://archive/neve?region=eu-central-1", url), tmp_path, env)
    assert [without_seconds(line) for line in printed if line.startswith("store: ")] == [
        without_seconds(line) for line in step.printed if line.startswith("store: ")
    ]
    with pytest.raises(AccessDenied):
        open_store(server.url(BUCKET, "elsewhere")).put("x", b"1")


@pytest.mark.parametrize("right", [right for one in BROKER["Statement"] for right in actions(one)])
def test_doctor_names_each_missing_right_of_a_broker(right: str, server: S3Server, become: Any) -> None:
    become(without(BROKER, right))
    failed = [check.found for check in check_store(server.url(BUCKET, PREFIX)) if check.state == FAIL]
    assert failed
    become(BROKER)
    states = {check.state for check in check_store(server.url(BUCKET, PREFIX))}
    assert states == {OK}
    named = re.findall(r"s3:\w+", " ".join(failed))
    assert right in named


def test_credentials_file_is_read_again_when_it_changes(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "credentials"

    def write(allowed: Policy) -> None:
        new = tmp_path / "new"
        lines = (f"{name.lower()}={value}\n" for name, value in credentials(server, allowed).items())
        new.write_text("[default]\n" + "".join(lines))
        new.replace(file)

    write(READER)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    store = open_store(server.url(BUCKET, PREFIX))
    with pytest.raises(AccessDenied):
        store.put("rotated", b"1")
    write(BROKER)
    with caplog.at_level("INFO"):
        store.put("rotated", b"1")
    (logged,) = re.findall(r"the broker logs `(.+?)`", PAGE.section("Supply credentials"))
    assert logged in caplog.text
    file.write_text("[default]\n")
    store.delete("rotated")
    assert "S3 credentials are kept" in caplog.text


def test_url_options_are_those_of_the_code() -> None:
    section = PAGE.section("Set the URL of the store")
    (numbers,) = re.findall(r"in parts: ([\d,]+) to ([\d,]+), default ([\d,]+)", section)
    assert [int(one.replace(",", "")) for one in numbers] == [MULTIPART_ABOVE_MIN, MULTIPART_ABOVE_MAX, MULTIPART_ABOVE]


def test_trial_store_serves_the_commands_of_the_page(
    neve_up: Callable[..., AbstractContextManager[Any]], tmp_path: Path
) -> None:
    serve, source, doctor, up = PAGE.commands("Create a bucket")
    assert source == ". /tmp/minio.env"
    assert up == 'neve up --data /tmp/neve --store "$NEVE_STORE"'
    started = serve.replace("/tmp/", f"{tmp_path}/").replace("--port 9000", "--port 0")
    wait = f"until [ $(wc -l < {tmp_path}/minio.env) = 3 ]; do sleep 0.1; done"
    script = f"{started}\n{wait}\n. {tmp_path}/minio.env\n{doctor}; code=$?; kill %1; wait; exit $code"
    printed = shell(script, Path(__file__).parents[2], {})
    assert "store: multipart uploads" in "\n".join(printed)
