"""`neve doctor` names the right that is missing for multipart uploads."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError

from infra.objects import doctor
from infra.objects.multipart import MultipartUploads
from infra.objects.s3 import S3Store
from infra.objects.store import AccessDenied

RIGHTS = {
    "create_multipart_upload": "s3:PutObject",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads on the bucket",
}


class RestrictedClient:
    """An S3 client that refuses some operations."""

    def __init__(self, refused: set[str]) -> None:
        self._refused = refused
        self.open: set[str] = set()

    def _ask(self, operation: str) -> None:
        if operation in self._refused:
            refusal = {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
            raise ClientError(refusal, operation)

    def create_multipart_upload(self, **place: str) -> dict[str, str]:
        self._ask("create_multipart_upload")
        self.open.add(place["Key"])
        return {"UploadId": "1"}

    def abort_multipart_upload(self, **where: str) -> None:
        self._ask("abort_multipart_upload")
        self.open.discard(where["Key"])

    def get_paginator(self, operation: str) -> Any:
        def paginate(**_: str) -> Iterator[dict[str, Any]]:
            self._ask(operation)
            yield {}

        return SimpleNamespace(paginate=paginate)


@pytest.fixture(autouse=True)
def region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


def uploads(*refused: str) -> tuple[MultipartUploads, RestrictedClient]:
    made = MultipartUploads("bucket", "prefix", endpoint="http://127.0.0.1:1", region="us-east-1")
    client = RestrictedClient(set(refused))
    made._client = client
    return made, client


def test_check_of_all_multipart_rights_leaves_no_upload() -> None:
    made, client = uploads()
    made.check_rights()
    assert client.open == set()


@pytest.mark.parametrize("operation", RIGHTS)
def test_missing_multipart_right_is_named(operation: str) -> None:
    made, _ = uploads(operation)
    with pytest.raises(AccessDenied, match=RIGHTS[operation].replace(":", "[:]")):
        made.check_rights()


def test_doctor_reports_a_missing_multipart_right(monkeypatch: pytest.MonkeyPatch) -> None:
    store = S3Store("s3://bucket/prefix", "bucket", "prefix", endpoint="http://127.0.0.1:1", region="us-east-1")
    made, _ = uploads("list_multipart_uploads")
    monkeypatch.setattr(store, "_uploads", lambda *_: made)
    found = doctor._check_multipart(store)
    assert (found.state, RIGHTS["list_multipart_uploads"] in found.found) == ("fail", True)
