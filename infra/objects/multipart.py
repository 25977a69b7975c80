"""Conditional multipart uploads, by boto3: obstore does not support them. Only worker processes load this module.

    create -> parts with CRC32, a few in parallel -> complete with If-None-Match: * -> the whole object, or 412

The completion is sent once, without retries of the library: a repetition could fail because the first one succeeded.
All other requests may be repeated, since nothing is visible before the completion.
"""

from __future__ import annotations

import base64
import logging
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from infra import failpoint
from infra.objects.store import (
    AccessDenied,
    ObjectStoreError,
    Pace,
    PreconditionFailed,
    ProbeFailed,
    StoreUnavailable,
    UnknownOutcome,
)
from neve.archive.store.s3_credentials import REFUSED
from neve.entropy import system_entropy, unique_name

log = logging.getLogger(__name__)
_FAILURES = (ClientError, BotoCoreError)
_ATTEMPTS = 4
PARTS_AT_ONCE = 4
STALE_MS = 24 * 3_600_000

Where = dict[str, Any]


class MultipartUploads:
    """Uploads whose parts become visible as one object in one conditional step.

    Raises PreconditionFailed if the object exists, ProbeFailed if the store ignores the condition.
    """

    def __init__(
        self, bucket: str, prefix: str, *, endpoint: str | None, region: str, profile: str | None = None
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        session = boto3.Session(profile_name=profile or None)

        def client(attempts: int) -> Any:
            config = Config(
                connect_timeout=5,
                read_timeout=60,
                retries={"total_max_attempts": attempts, "mode": "standard"},
                s3={"addressing_style": "path"},
            )
            return session.client("s3", endpoint_url=endpoint, region_name=region, config=config)

        self._client, self._once = client(_ATTEMPTS), client(1)
        self._proof = threading.Lock()
        self._proven = False

    def put_if_absent(self, key: str, path: Path, part_size: int, pace: Pace) -> str:
        """Upload a file under a new key, and return its etag."""
        self._prove_condition()
        place = {"Bucket": self._bucket, "Key": self._prefix + key}
        try:
            self._abort_former(place)
            where = {
                **place,
                "UploadId": self._client.create_multipart_upload(**place, ChecksumAlgorithm="CRC32")["UploadId"],
            }
        except _FAILURES as error:
            raise _translate(error, key) from error
        try:
            return self._complete(key, where, self._upload(key, where, path, part_size, pace))
        except ObjectStoreError:
            self._abort_quietly(where)
            raise

    def _upload(self, key: str, where: Where, path: Path, part_size: int, pace: Pace) -> list[Where]:
        def upload(number: int) -> Where:
            with path.open("rb") as file:
                file.seek((number - 1) * part_size)
                data = file.read(part_size)
            pace(len(data))
            checksum = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
            answer = self._client.upload_part(**where, PartNumber=number, Body=data, ChecksumCRC32=checksum)
            failpoint.hit("object_store.mid_put")
            return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32": checksum}

        count = -(-path.stat().st_size // part_size)
        pool = ThreadPoolExecutor(PARTS_AT_ONCE, "part")
        try:
            return list(pool.map(upload, range(1, count + 1)))
        except _FAILURES as error:
            raise _translate(error, key) from error
        finally:
            pool.shutdown(cancel_futures=True)

    def _complete(self, key: str, where: Where, parts: list[Where]) -> str:
        try:
            failpoint.hit("object_store.before_complete")
            answer = self._once.complete_multipart_upload(**where, MultipartUpload={"Parts": parts}, IfNoneMatch="*")
            failpoint.hit("object_store.after_complete")
        except (*_FAILURES, OSError) as error:
            raise _translate(error, key, completing=True) from error
        return str(answer["ETag"]).strip('"')

    def _prove_condition(self) -> None:
        """Check once per store that a completion over an existing object is refused."""
        with self._proof:
            if self._proven:
                return
            place = {"Bucket": self._bucket, "Key": f"{self._prefix}.probe-{unique_name(system_entropy)}"}
            try:
                self._client.put_object(**place, Body=b"first")
                where = {**place, "UploadId": self._client.create_multipart_upload(**place)["UploadId"]}
                part = self._client.upload_part(**where, PartNumber=1, Body=b"second")
                try:
                    self._complete("the probe", where, [{"PartNumber": 1, "ETag": part["ETag"]}])
                except PreconditionFailed:
                    self._proven = True
                finally:
                    self._abort_quietly(where)
                    self._client.delete_object(**place)
            except _FAILURES as error:
                raise _translate(error, "the probe") from error
            if not self._proven:
                raise ProbeFailed(
                    f"bucket {self._bucket} ignores If-None-Match: * at the end of a multipart upload: objects above "
                    "multipartAbove are unsafe: raise multipartAbove above the largest object"
                )

    def check_rights(self) -> None:
        """Check the permissions that only multipart uploads need: begin, abort and list an upload.

        Raises:
            AccessDenied: a right is missing; the text names it.
            StoreUnavailable: the store failed.
        """
        place = {"Bucket": self._bucket, "Key": f"{self._prefix}.probe-{unique_name(system_entropy)}"}
        right = "s3:PutObject"
        try:
            where = {**place, "UploadId": self._client.create_multipart_upload(**place)["UploadId"]}
            right = "s3:AbortMultipartUpload"
            self._client.abort_multipart_upload(**where)
            right = "s3:ListBucketMultipartUploads on the bucket"
            list(self._uploads(place["Key"]))
        except _FAILURES as error:
            found = _translate(error, "a multipart upload")
            if isinstance(found, AccessDenied) and not found.of_credentials:
                raise AccessDenied(f"grant access (in S3: {right}): {error}") from error
            raise found from error

    # ---- unfinished uploads of crashed writers

    def _abort_former(self, place: Where) -> None:
        """Abort uploads of the same key, which one round of one broker owns: their workers are dead or orphaned."""
        for upload in self._uploads(place["Key"]):
            if upload["Key"] == place["Key"]:
                self._abort_quietly({**place, "UploadId": upload["UploadId"]})

    def remove_stale(self, ours: Callable[[str], bool], now_ms: int) -> int:
        """Abort uploads older than a day of keys for which `ours` is true; return their number.

        MinIO lists uploads only by their exact key, and removes them after a day itself.
        """
        removed = 0
        try:
            for upload in self._uploads(self._prefix):
                started = int(upload["Initiated"].timestamp() * 1000)
                if ours(upload["Key"].removeprefix(self._prefix)) and started + STALE_MS <= now_ms:
                    self._client.abort_multipart_upload(
                        Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
                    removed += 1
        except _FAILURES as error:
            raise _translate(error, "unfinished uploads") from error
        return removed

    def _uploads(self, prefix: str) -> Iterator[Where]:
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix)
        for page in pages:
            yield from page.get("Uploads", ())

    def _abort_quietly(self, where: Where) -> None:
        try:
            self._client.abort_multipart_upload(**where)
        except _FAILURES as error:
            log.info("multipart upload not aborted, the sweep removes it: key=%s error=%s", where["Key"], error)


def _translate(error: Exception, key: str, *, completing: bool = False) -> ObjectStoreError:
    text = f"{key}: {error}"
    answer = error.response if isinstance(error, ClientError) else {}
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if completing and status == 412:
        return PreconditionFailed(text)
    of_credentials = answer.get("Error", {}).get("Code") in REFUSED
    if of_credentials or status in {401, 403}:
        denied = AccessDenied(text)
        denied.of_credentials = of_credentials
        return denied
    # Also for a 404: the upload is gone, perhaps because it was completed.
    return UnknownOutcome(text) if completing else StoreUnavailable(text)
