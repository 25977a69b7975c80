"""An object store in S3 or a compatible service, by obstore (Rust, releases the GIL).

Credentials come from the environment (AWS_ACCESS_KEY_ID etc.), a profile (AWS_PROFILE, read by boto3) or the role of
the machine; never from the URL. Expiring credentials are renewed in time. The clients are reopened with fresh
credentials when a credentials file changes, and when the store rejects the credentials of a request, which is then
repeated once.

A conditional PUT is sent exactly once: a silent retry of the library would report its own earlier success as a refusal,
so the caller reads back instead. Only 409 is retried: S3 stored nothing, since another request for the key was in
progress. A large conditional PUT is a multipart upload (`multipart`).
"""

from __future__ import annotations

import email.utils
import http.client
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore import exceptions as errors
from obstore.store import S3Store as ObstoreS3

from infra.clock import Clock, SystemClock
from infra.objects.store import (
    AccessDenied,
    NoSuchBucket,
    NotFound,
    ObjectInfo,
    ObjectStoreError,
    Pace,
    PreconditionFailed,
    PutOutcome,
    StoreUnavailable,
    UnknownOutcome,
    check_key,
    check_prefix,
    unpaced,
)
from neve.archive.store import s3_credentials
from neve.archive.store.url import check_endpoint

if TYPE_CHECKING:
    from infra.objects.multipart import MultipartUploads

log = logging.getLogger(__name__)
T = TypeVar("T")
MULTIPART_ABOVE = 128 << 20
PART_SIZE = 32 << 20
READ_RETRIES = 2
_BOOKKEEPING = re.compile(r" in [\d.]+[a-zµ]+(, after \d+ retries, max_retries: \d+, retry_timeout: \w+ )?")
_CAUSE = re.compile(r'^ +message: "([^"]+)"', re.MULTILINE)
_TIMED_OUT = re.compile(r"\bTimedOut\b|kind: Timeout\b")
_S3_CODE = re.compile(r"<Code>([^<]{1,100})</Code>")
_S3_MESSAGE = re.compile(r"<Message>([^<]{1,300})</Message>")
_MAY_BE_CREDENTIALS = re.compile(r"status code: 40[013]\b")
_CONFLICT = re.compile(r"status code: 409\b")
_CONFLICT_PAUSES_S = (0.05, 0.2, 0.8)
_RENEW_PAUSE_S = 5.0  # limits repeated requests if the store rejects all credentials
_METADATA_HOST = "//169.254.169.254/"
_FAILURES = (errors.BaseError, OSError)  # obstore raises FileNotFoundError for a 404


class S3Store:
    """An `ObjectStore` in a bucket; safe to share between threads.

    Raises the errors of the protocol, never those of obstore or boto3.
    """

    def __init__(
        self,
        url: str,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        region: str | None = None,
        multipart_above: int = MULTIPART_ABOVE,
        clock: Clock | None = None,
    ) -> None:
        self.url = url
        self._bucket, self._prefix = bucket, prefix
        self._multipart_above = multipart_above
        self._clock: Clock = clock or SystemClock()
        self._opening = threading.Lock()
        self.requests: Counter[str] = Counter()
        self._endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        self._region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        if self._endpoint is not None:
            check_endpoint(self._endpoint)
        # boto3 would prefer a named profile to the credentials in the environment.
        self._profile = None if s3_credentials.is_static() else os.environ.get("AWS_PROFILE")
        self._renewed_at = -_RENEW_PAUSE_S
        self._connection = self._connect()

    # ---- credentials

    def _connect(self) -> _Connection:
        """Open clients with the current credentials. Raises AccessDenied."""
        stamp = s3_credentials.files_stamp()  # first: the next request detects a change during the reading
        provider = _profile_provider(self._profile)
        reader = self._client(self._bucket, self._prefix, READ_RETRIES, provider)
        return _Connection(reader, self._client(self._bucket, self._prefix, 0, provider), stamp, provider is not None)

    def _connected(self) -> _Connection:
        """Return the connection, reopened if a credentials file has changed."""
        with self._opening:
            if not s3_credentials.is_static() and s3_credentials.files_stamp() != self._connection.stamp:
                self._reconnect("a file with credentials changed")
            return self._connection

    def _renewed(self, refused: _Connection) -> bool:
        """Return whether there is a newer connection than the rejected one."""
        if s3_credentials.is_static():
            return False
        with self._opening:
            if self._connection is not refused:
                return True
            now = self._clock.monotonic()
            if now - self._renewed_at < _RENEW_PAUSE_S:
                return False
            self._renewed_at = now
            return self._reconnect("the store refused the credentials")

    def _reconnect(self, why: str) -> bool:
        """Reopen the clients, unless no credentials can be read: another program may be writing the file."""
        try:
            found = self._connect()
        except AccessDenied as error:
            log.warning("S3 credentials are kept: cause=%s error=%s", why, error)
            return False
        if self._connection.of_profile and not found.of_profile:
            log.warning("S3 credentials are kept: cause=%s error=no credentials in the profile", why)
            return False
        log.info("S3 credentials are read again: cause=%s", why)
        self._connection = found
        return True

    def _asked(self, key: str, work: Callable[[_Connection], T], *, writing: bool = False) -> T:
        """Run a request; repeat it once with fresh credentials if the store rejects the first ones."""
        connection = self._connected()
        try:
            return _tried(connection, key, work, writing=writing)
        except AccessDenied as refusal:
            if not refusal.of_credentials or not self._renewed(connection):
                raise
        return _tried(self._connected(), key, work, writing=writing)

    def _client(self, bucket: str, prefix: str, retries: int, provider: Any) -> Any:
        options: dict[str, Any] = {"region": self._region, "virtual_hosted_style_request": False}
        if self._endpoint is not None:
            options["endpoint"] = self._endpoint
        if provider is not None:
            options["credential_provider"] = provider
        return ObstoreS3(
            bucket,
            prefix=prefix or None,
            client_options={
                "connect_timeout": timedelta(seconds=5),
                "timeout": timedelta(seconds=300),
                "read_timeout": timedelta(seconds=30),
                "allow_http": (self._endpoint or "https:").startswith("http:"),
            },
            retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=20)},
            checksum_algorithm="SHA256",
            conditional_put="etag",
            **options,
        )

    # ---- requests

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False, pace: Pace = unpaced) -> PutOutcome:
        self.requests["put"] += 1
        check_key(key)
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        large = size > self._multipart_above
        if large and if_absent and isinstance(data, Path):
            path, part_size = data, min(PART_SIZE, self._multipart_above)
            return PutOutcome(
                self._asked(key, lambda connection: self._uploads(connection).put_if_absent(key, path, part_size, pace))
            )
        pace(size)

        def put(connection: _Connection) -> Any:
            for pause_s in (*_CONFLICT_PAUSES_S, None):
                try:
                    return obstore.put(
                        connection.writer,
                        key,
                        data,
                        mode="create" if if_absent else "overwrite",
                        use_multipart=large and not if_absent,
                        chunk_size=PART_SIZE,
                        max_concurrency=4,
                    )
                except errors.AlreadyExistsError as error:
                    if pause_s is None or not _is_conflict(error):
                        raise
                    time.sleep(pause_s)
            raise AssertionError("unreachable")

        return PutOutcome((self._asked(key, put, writing=True)["e_tag"] or "").strip('"'))

    def check_multipart_rights(self) -> None:
        """Check the rights that objects above `multipartAbove` need. Loads boto3.

        Raises:
            AccessDenied: a right is missing; the text names it.
            StoreUnavailable: the store failed.
        """
        self._asked("a multipart upload", lambda connection: self._uploads(connection).check_rights())

    def _uploads(self, connection: _Connection) -> MultipartUploads:
        """Conditional multipart uploads by boto3, loaded when they are needed: obstore does not support them."""
        from infra.objects.multipart import MultipartUploads  # noqa: PLC0415

        with self._opening:
            if connection.multipart is None:
                connection.multipart = MultipartUploads(
                    self._bucket, self._prefix, endpoint=self._endpoint, region=self._region, profile=self._profile
                )
            return connection.multipart

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        check_key(key)
        return self._asked(key, lambda connection: bytes(obstore.get(connection.reader, key).bytes()))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.requests["get_range"] += 1
        check_key(key)
        return self._asked(
            key, lambda connection: bytes(obstore.get_range(connection.reader, key, start=start, length=length))
        )

    def head(self, key: str) -> ObjectInfo:
        self.requests["head"] += 1
        check_key(key)
        return self._asked(key, lambda connection: _info(obstore.head(connection.reader, key)))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.requests["list"] += 1
        within = check_prefix(prefix) or None

        def begin(connection: _Connection) -> tuple[Iterator[Any], Any]:
            chunks = iter(obstore.list(connection.reader, within, chunk_size=1000))
            return chunks, next(chunks, ())

        chunks, chunk = self._asked(prefix, begin)
        try:
            while chunk:
                for meta in chunk:
                    yield _info(meta)
                chunk = next(chunks, ())
        except _FAILURES as error:
            raise _translate(error, prefix) from error

    def list_prefixes(self, prefix: str) -> Sequence[str]:
        self.requests["list_prefixes"] += 1
        within = check_prefix(prefix) or None
        found = self._asked(prefix, lambda connection: obstore.list_with_delimiter(connection.reader, within))
        return sorted(f"{name}/" for name in found["common_prefixes"])

    def delete(self, key: str) -> None:
        self.requests["delete"] += 1
        check_key(key)

        def delete(connection: _Connection) -> None:
            with suppress(FileNotFoundError):
                obstore.delete(connection.reader, key)

        self._asked(key, delete, writing=True)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete a thousand objects per request; one by one if that fails, since not every store supports it."""
        for key in keys:
            check_key(key)
        self.requests["delete_many"] += 1
        try:
            obstore.delete(self._connected().reader, list(keys))
        except _FAILURES:
            for key in keys:
                self.delete(key)

    def now_ms(self) -> int | None:
        """Return the time in the Date header of an unsigned request, which even a refusal has."""
        self.requests["now"] += 1
        address = urlsplit(self._endpoint or f"https://s3.{self._region}.amazonaws.com")
        plain = address.scheme == "http"
        kind = http.client.HTTPConnection if plain else http.client.HTTPSConnection
        connection = kind(address.hostname or "", address.port, timeout=10)
        try:
            connection.request("HEAD", "/")
            date = connection.getresponse().getheader("Date")
        except (OSError, http.client.HTTPException) as error:
            raise StoreUnavailable(f"{address.netloc}: {error}") from error
        finally:
            connection.close()
        if date is None:
            return None
        return int(email.utils.parsedate_to_datetime(date).timestamp() * 1000)

    def remove_stale_uploads(self, ours: Callable[[str], bool]) -> int:
        """Remove old uploads, by the store's clock, which also dates them."""
        self.requests["list_uploads"] += 1
        now = self.now_ms()
        if now is None:
            return 0
        return self._asked("unfinished uploads", lambda connection: self._uploads(connection).remove_stale(ours, now))


@dataclass(eq=False, slots=True)
class _Connection:
    """Clients that have read their credentials at the same time."""

    reader: Any
    writer: Any
    stamp: s3_credentials.Stamp
    of_profile: bool
    multipart: MultipartUploads | None = None


def _tried(connection: _Connection, key: str, work: Callable[[_Connection], T], *, writing: bool) -> T:
    try:
        return work(connection)
    except ObjectStoreError:
        raise
    except _FAILURES as error:
        raise _translate(error, key, writing=writing) from error


def _profile_provider(profile: str | None = None) -> Any:
    """Open a profile through boto3, which knows SSO and credential processes; it is only loaded where there is one.

    Without a name the profile `default` counts, as in other programs. Raises AccessDenied.
    """
    if s3_credentials.is_static() or not (profile or s3_credentials.has_profiles()):
        return None
    import boto3  # noqa: PLC0415
    from botocore.exceptions import BotoCoreError  # noqa: PLC0415

    try:
        credentials = boto3.Session(profile_name=profile or None).get_credentials()
    except BotoCoreError as error:
        raise AccessDenied(f"profile {profile or 'default'}: {error}") from error
    if credentials is None and profile:
        raise AccessDenied(f"profile {profile}: it has no credentials")
    return None if credentials is None else _ProfileProvider(credentials)


class _ProfileProvider:
    """Passes botocore's credentials to obstore, which renews them five minutes before they expire."""

    def __init__(self, credentials: Any) -> None:
        self.config: dict[str, str] = {}  # required by obstore: client settings
        self._credentials = credentials

    def __call__(self) -> dict[str, Any]:
        frozen = self._credentials.get_frozen_credentials()
        # Only renewable credentials have an expiry; others are replaced after a rejection or a change of their file.
        expiry = getattr(self._credentials, "_expiry_time", None)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": None if expiry is None else expiry.astimezone(UTC),
        }


def _text(error: Exception) -> str:
    """Return the first line of an obstore error without retry statistics, with the cause from the lines below it."""
    whole = str(error)
    lines = whole.splitlines()
    if not lines:
        return type(error).__name__
    first = _BOOKKEEPING.sub("", lines[0].removeprefix("Generic S3 error: ").removeprefix("Error performing "))
    if (code := _S3_CODE.search(whole)) is not None:
        message = _S3_MESSAGE.search(whole)
        return f"{first.partition('<')[0].strip(' :')}: {code[1]}" + (f": {message[1]}" if message is not None else "")
    text, dump = first[:300], "\n".join(lines[1:])
    cause = _CAUSE.search(dump)
    if cause is not None:
        return text if cause[1] in text else f"{text}: {cause[1]}"
    return f"{text}: timed out" if _TIMED_OUT.search(dump) else text


def _info(meta: Any) -> ObjectInfo:
    modified = int(meta["last_modified"].timestamp() * 1000)
    return ObjectInfo(str(meta["path"]), int(meta["size"]), (meta["e_tag"] or "").strip('"'), modified)


def _translate(error: Exception, key: str, *, writing: bool = False) -> ObjectStoreError:
    text = f"{key}: {_text(error)}"
    if _METADATA_HOST in text:  # obstore's last source of credentials: there were no others
        return StoreUnavailable(
            f"{key}: no credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set, nor AWS_PROFILE, "
            "there is no credentials file, and the machine's role does not answer"
        )
    if _is_conflict(error):
        return UnknownOutcome(text)
    if isinstance(error, errors.AlreadyExistsError | errors.PreconditionError):
        return PreconditionFailed(text)
    if "<Code>NoSuchBucket<" in str(error):  # as NotFound it would look like the end of a journal
        return NoSuchBucket(f"{key}: the bucket does not exist: {_text(error)}")
    if isinstance(error, FileNotFoundError | errors.NotFoundError):
        return NotFound(text)
    refused = isinstance(error, errors.PermissionDeniedError | errors.UnauthenticatedError)
    of_credentials = _is_of_credentials(error)
    # obstore has no exception class for a refused listing, and some stores answer 400 to an expired token.
    if refused or of_credentials or "status code: 403" in text:
        denied = AccessDenied(text)
        denied.of_credentials = of_credentials
        return denied
    return UnknownOutcome(text) if writing else StoreUnavailable(text)


def _is_of_credentials(error: Exception) -> bool:
    """Decide by S3's error code. The answer to a HEAD has none, so its status may mean invalid credentials."""
    text = str(error)
    code = _S3_CODE.search(text)
    return code[1] in s3_credentials.REFUSED if code is not None else _MAY_BE_CREDENTIALS.search(text) is not None


def _is_conflict(error: Exception) -> bool:
    """Return whether it is S3's ConditionalRequestConflict: another request for the key was in progress."""
    return isinstance(error, errors.AlreadyExistsError) and _CONFLICT.search(str(error)) is not None
