"""Tests of credentials that expire, change or are refused: new ones are used without a restart."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from infra.clock import ManualClock
from infra.objects import multipart
from infra.objects.open import open_store
from infra.objects.s3 import S3Store
from infra.objects.store import AccessDenied, NotFound, PreconditionFailed, UnknownOutcome
from neve.archive.store.source import open_source
from tests.kit.clock.waiting import wait_until
from tests.kit.server.fake_s3 import FakeS3, fake_s3

KEY = "some/key"


@pytest.fixture
def server() -> Iterator[FakeS3]:
    with fake_s3() as server:
        server.objects[f"/bucket/prefix/{KEY}"] = b"content"
        yield server


class Home:
    """AWS files and a credential process, as maintained by agents that rotate credentials."""

    def __init__(self, root: Path) -> None:
        self.credentials, self.config, self.issued = root / "credentials", root / "config", root / "issued"
        self._script = root / "process"

    def write_keys(self, key_id: str) -> None:
        self.credentials.write_text(
            f"[default]\naws_access_key_id = {key_id}\naws_secret_access_key = s\naws_session_token = t\n"
        )

    def issue(self, key_id: str, lifetime: timedelta | None = None) -> None:
        """Let the process print another key. Its output is no file of AWS: the store does not notice the change."""
        issued = {"Version": 1, "AccessKeyId": key_id, "SecretAccessKey": "s", "SessionToken": "t"}
        if lifetime is not None:
            issued["Expiration"] = (datetime.now(UTC) + lifetime).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.issued.write_text(json.dumps(issued))
        if not self._script.exists():
            self._script.write_text(f"#!{sys.executable}\nprint(open({str(self.issued)!r}).read())\n")
            self._script.chmod(0o755)
            self.config.write_text(f"[default]\ncredential_process = {self._script}\n")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    found = Home(tmp_path)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(found.credentials))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(found.config))
    return found


READERS: dict[str, Callable[[str], Any]] = {"store": open_store, "source": open_source}


@pytest.mark.parametrize("kind", READERS)
def test_rewritten_credentials_file_applies_to_the_next_request(kind: str, server: FakeS3, home: Home) -> None:
    home.write_keys("K1")
    server.accepted = {"K1"}
    store = READERS[kind](server.url())
    assert store.get(KEY) == b"content"
    home.write_keys("K2-longer")
    server.accepted = {"K2-longer"}
    server.asked.clear()
    assert store.get(KEY) == b"content"
    assert server.refused() == 0


@pytest.mark.parametrize("refusal", [(403, "ExpiredToken"), (400, "ExpiredToken"), (403, "InvalidAccessKeyId")])
@pytest.mark.parametrize("kind", READERS)
def test_refused_request_is_repeated_with_new_credentials(
    kind: str, refusal: tuple[int, str], server: FakeS3, home: Home
) -> None:
    home.issue("K1")
    server.accepted, server.refusal = {"K1"}, refusal
    store = READERS[kind](server.url())
    assert store.get(KEY) == b"content"
    home.issue("K2")
    server.accepted = {"K2"}
    server.asked.clear()
    assert store.get(KEY) == b"content"
    assert server.asked == [("GET", "K1"), ("GET", "K2")]
    assert store.get(KEY) == b"content"
    assert server.refused() == 1


CALLS: dict[str, Callable[[S3Store], object]] = {
    "put": lambda store: store.put("new", b"x", if_absent=True),
    "get_range": lambda store: store.get_range(KEY, 0, 3),
    "head": lambda store: store.head(KEY),
    "list": lambda store: list(store.list("")),
    "list_prefixes": lambda store: store.list_prefixes(""),
    "delete": lambda store: store.delete(KEY),
    "delete_many": lambda store: store.delete_many([KEY]),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_request_of_a_store_survives_a_refusal(name: str, server: FakeS3, home: Home) -> None:
    home.issue("K1")
    server.accepted = {"K1"}
    store = S3Store(server.url(), "bucket", "prefix", endpoint=server.endpoint)
    store.get(KEY)
    home.issue("K2")
    server.accepted = {"K2"}
    CALLS[name](store)


def test_credentials_that_expire_are_renewed_before(server: FakeS3, home: Home) -> None:
    """A token valid for two more minutes is not used for another half hour."""
    home.issue("K1", timedelta(minutes=2))
    store = open_store(server.url())
    store.get(KEY)
    home.issue("K2", timedelta(minutes=2))

    def is_renewed() -> bool:
        store.get(KEY)
        return server.asked[-1] == ("GET", "K2")

    wait_until(is_renewed)
    assert {key_id for _, key_id in server.asked} == {"K1", "K2"}


def test_partially_written_file_keeps_the_old_credentials(server: FakeS3, home: Home) -> None:
    home.write_keys("K1")
    server.accepted = {"K1"}
    store, source = open_store(server.url()), open_source(server.url())
    for unfinished in ("", "[default]\n", "[default]\naws_access_key_id = K2\n"):
        home.credentials.write_text(unfinished)
        assert store.get(KEY) == source.get(KEY) == b"content"
    home.write_keys("K2-longer")
    server.accepted = {"K2-longer"}
    server.asked.clear()
    assert store.get(KEY) == source.get(KEY) == b"content"
    assert server.refused() == 0


def test_missing_rights_do_not_repeat_a_request(server: FakeS3, home: Home) -> None:
    home.issue("K1")
    server.accepted, server.refusal = {"other"}, (403, "AccessDenied")
    with pytest.raises(AccessDenied):
        open_store(server.url()).get(KEY)
    assert len(server.asked) == 1


def test_permanently_refused_credentials_are_not_retried_each_time(server: FakeS3, home: Home) -> None:
    home.issue("K1")
    server.accepted = {"other"}
    clock = ManualClock()
    store = S3Store(server.url(), "bucket", "prefix", endpoint=server.endpoint, clock=clock)
    for requests in (2, 3, 4):
        with pytest.raises(AccessDenied, match="ExpiredToken"):
            store.get(KEY)
        assert len(server.asked) == requests
    clock.advance(60_000)
    home.issue("K2")
    server.accepted = {"K2"}
    assert store.get(KEY) == b"content"


def test_refused_environment_credentials_are_not_retried(
    server: FakeS3, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "K1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    server.accepted = {"K2"}
    with pytest.raises(AccessDenied):
        open_store(server.url()).get(KEY)
    with pytest.raises(PermissionError):
        open_source(server.url()).get(KEY)
    assert len(server.asked) == 2


def test_multipart_upload_restarts_with_new_credentials(
    server: FakeS3, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    class Uploads:
        def __init__(self, *_: object, **__: object) -> None:
            made.append(self)

        def put_if_absent(self, key: str, *_: object) -> str:
            if len(made) == 1:
                refusal = AccessDenied(f"{key}: ExpiredToken")
                refusal.of_credentials = True
                raise refusal
            return "etag"

    monkeypatch.setattr(multipart, "MultipartUploads", Uploads)
    home.issue("K1")
    store = S3Store(server.url(), "bucket", endpoint=server.endpoint, multipart_above=1)
    large = tmp_path / "large"
    large.write_bytes(b"xx")
    assert store.put("large", large, if_absent=True).etag == "etag"
    assert len(made) == 2


# ---- 409


def test_conditional_put_is_repeated_after_a_409(server: FakeS3, home: Home) -> None:
    home.write_keys("K1")
    server.conflicts = 2
    open_store(server.url()).put("new", b"x", if_absent=True)
    assert server.objects["/bucket/prefix/new"] == b"x"
    with pytest.raises(PreconditionFailed):
        open_store(server.url()).put("new", b"y", if_absent=True)


def test_permanent_409_leaves_the_outcome_unknown(server: FakeS3, home: Home) -> None:
    home.write_keys("K1")
    server.conflicts = 1000
    store = open_store(server.url())
    with pytest.raises(UnknownOutcome):
        store.put("new", b"x", if_absent=True)
    with pytest.raises(NotFound):
        store.get("new")
