"""An object store in S3 or a store that speaks its protocol, over obstore (Rust, releases the GIL).

Credentials come from the environment (AWS_ACCESS_KEY_ID …), a profile (AWS_PROFILE, read by boto3) or the machine's
role; never from the URL. Conditional PUTs go out exactly once: a library's silent retry would turn our own success
into a refusal, so the caller reads back instead. A large conditional one goes out in parts, through `s3_multipart`.
"""

from __future__ import annotations

import email.utils
import http.client
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from obstore import exceptions as errors
from obstore.store import S3Store as ObstoreS3

from infra.object_store.protocol import (
    AccessDenied,
    BadStoreUrl,
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
from neve.archive.store_url import check_endpoint

if TYPE_CHECKING:
    from infra.object_store.multipart import MultipartUploads

MULTIPART_ABOVE = 128 << 20
MULTIPART_ABOVE_MIN, MULTIPART_ABOVE_MAX = 5 << 20, 5 << 30
PART_SIZE = 32 << 20
READ_RETRIES = 2
_BOOKKEEPING = re.compile(r" in [\d.]+[a-zµ]+(, after \d+ retries, max_retries: \d+, retry_timeout: \w+ )?")
_CAUSE = re.compile(r'^ +message: "([^"]+)"', re.MULTILINE)
_TIMED_OUT = re.compile(r"\bTimedOut\b|kind: Timeout\b")
_S3_CODE = re.compile(r"<Code>([^<]{1,100})</Code>")
_S3_MESSAGE = re.compile(r"<Message>([^<]{1,300})</Message>")
_METADATA_HOST = "//169.254.169.254/"
_FAILURES = (errors.BaseError, OSError)  # the library reports 404 as the built-in FileNotFoundError


class S3Store:
    """An `ObjectStore` in a bucket; safe to share between threads.

    Raises the protocol's errors, never obstore's or boto3's.
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
    ) -> None:
        self.url = url
        self._bucket, self._prefix = bucket, prefix
        self._multipart_above = multipart_above
        self._multipart: MultipartUploads | None = None
        self._opening = threading.Lock()
        self.requests: Counter[str] = Counter()
        self._endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        self._region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        if self._endpoint is not None:
            check_endpoint(self._endpoint)
        provider = _profile_provider()
        self._reader = self._client(bucket, prefix, READ_RETRIES, provider)
        self._writer = self._client(bucket, prefix, 0, provider)

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

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False, pace: Pace = unpaced) -> PutOutcome:
        self.requests["put"] += 1
        check_key(key)
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        large = size > self._multipart_above
        if large and if_absent and isinstance(data, Path):
            part_size = min(PART_SIZE, self._multipart_above)
            return PutOutcome(self._uploads().put_if_absent(key, data, part_size, pace))
        pace(size)
        mode = "create" if if_absent else "overwrite"
        try:
            result = obstore.put(
                self._writer,
                key,
                data,
                mode=mode,
                use_multipart=large and not if_absent,
                chunk_size=PART_SIZE,
                max_concurrency=4,
            )
        except _FAILURES as error:
            raise _translate(error, key, writing=True) from error
        return PutOutcome((result["e_tag"] or "").strip('"'))

    def check_multipart_rights(self) -> None:
        """Check the rights that objects above `multipartAbove` need. Loads boto3.

        Raises:
            AccessDenied: a right is missing; the text names it.
            StoreUnavailable: the store failed.
        """
        self._uploads().check_rights()

    def _uploads(self) -> MultipartUploads:
        """obstore can't make the end of a multipart upload conditional; boto3 is only loaded where that is needed."""
        from infra.object_store.multipart import MultipartUploads  # noqa: PLC0415

        with self._opening:
            if self._multipart is None:
                self._multipart = MultipartUploads(
                    self._bucket, self._prefix, endpoint=self._endpoint, region=self._region
                )
            return self._multipart

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        check_key(key)
        try:
            return bytes(obstore.get(self._reader, key).bytes())
        except _FAILURES as error:
            raise _translate(error, key) from error

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.requests["get_range"] += 1
        check_key(key)
        try:
            return bytes(obstore.get_range(self._reader, key, start=start, length=length))
        except _FAILURES as error:
            raise _translate(error, key) from error

    def head(self, key: str) -> ObjectInfo:
        self.requests["head"] += 1
        check_key(key)
        try:
            return _info(obstore.head(self._reader, key))
        except _FAILURES as error:
            raise _translate(error, key) from error

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.requests["list"] += 1
        try:
            for chunk in obstore.list(self._reader, check_prefix(prefix) or None, chunk_size=1000):
                for meta in chunk:
                    yield _info(meta)
        except _FAILURES as error:
            raise _translate(error, prefix) from error

    def list_prefixes(self, prefix: str) -> Sequence[str]:
        self.requests["list_prefixes"] += 1
        try:
            found = obstore.list_with_delimiter(self._reader, check_prefix(prefix) or None)
        except _FAILURES as error:
            raise _translate(error, prefix) from error
        return sorted(f"{name}/" for name in found["common_prefixes"])

    def delete(self, key: str) -> None:
        self.requests["delete"] += 1
        try:
            obstore.delete(self._reader, check_key(key))
        except FileNotFoundError:
            return
        except _FAILURES as error:
            raise _translate(error, key, writing=True) from error

    def delete_many(self, keys: Sequence[str]) -> None:
        """A thousand by one request. Not every store knows that one: where it fails, each is asked for by itself."""
        for key in keys:
            check_key(key)
        self.requests["delete_many"] += 1
        try:
            obstore.delete(self._reader, list(keys))
        except _FAILURES:
            for key in keys:
                self.delete(key)

    def now_ms(self) -> int | None:
        """The Date header of an unsigned request: every answer carries one, a refusal too."""
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
        """By the store's clock, which also says when an upload began."""
        self.requests["list_uploads"] += 1
        now = self.now_ms()
        return 0 if now is None else self._uploads().remove_stale(ours, now)


def parse_multipart_above(text: str) -> int:
    """S3 takes no part below 5 MiB but the last, and no single PUT above 5 GiB."""
    if not text.isdecimal() or not MULTIPART_ABOVE_MIN <= int(text) <= MULTIPART_ABOVE_MAX:
        raise BadStoreUrl(f"multipartAbove is a number of bytes from {MULTIPART_ABOVE_MIN} to {MULTIPART_ABOVE_MAX}")
    return int(text)


def _profile_provider() -> Any:
    """boto3 knows profiles, SSO and credential processes; it is only loaded where there is one.

    Without AWS_PROFILE the profile `default` counts, as everywhere else.
    """
    profile = os.environ.get("AWS_PROFILE")
    if os.environ.get("AWS_ACCESS_KEY_ID") or not (profile or _has_profiles()):
        return None
    import boto3  # noqa: PLC0415
    from botocore.exceptions import BotoCoreError  # noqa: PLC0415
    from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415

    try:
        session = boto3.Session(profile_name=profile or None)
        if not profile and session.get_credentials() is None:
            return None  # the files are there, and say nothing of credentials
        return Boto3CredentialProvider(session)
    except (BotoCoreError, ValueError) as error:
        raise AccessDenied(f"profile {profile or 'default'}: {error}") from error


def _has_profiles() -> bool:
    files = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
    return any(Path(os.environ.get(name) or usual).expanduser().is_file() for name, usual in files.items())


def _text(error: Exception) -> str:
    """Return the first line of the library's text without its bookkeeping, and the cause out of the lines below it."""
    whole = str(error)
    lines = whole.splitlines()
    if not lines:
        return type(error).__name__
    first = _BOOKKEEPING.sub("", lines[0].removeprefix("Generic S3 error: ").removeprefix("Error performing "))
    if (code := _S3_CODE.search(whole)) is not None:
        said = _S3_MESSAGE.search(whole)
        return f"{first.partition('<')[0].strip(' :')}: {code[1]}" + (f": {said[1]}" if said is not None else "")
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
    if _METADATA_HOST in text:  # the library's last resort; it asked nobody else before
        return StoreUnavailable(
            f"{key}: no credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set, nor AWS_PROFILE, "
            "there is no credentials file, and the machine's role does not answer"
        )
    if isinstance(error, errors.AlreadyExistsError | errors.PreconditionError):
        return PreconditionFailed(text)
    if "<Code>NoSuchBucket<" in str(error):  # says nothing about the object: it must not look like the end of a journal
        return StoreUnavailable(f"{key}: the bucket does not exist: {_text(error)}")
    if isinstance(error, FileNotFoundError | errors.NotFoundError):
        return NotFound(text)
    refused = isinstance(error, errors.PermissionDeniedError | errors.UnauthenticatedError)
    if refused or "status code: 403" in text:  # a refused listing has no class of its own in the library
        return AccessDenied(text)
    return UnknownOutcome(text) if writing else StoreUnavailable(text)
