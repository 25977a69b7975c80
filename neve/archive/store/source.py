"""Read an archive store without a broker: a directory, or S3 through boto3."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from neve.archive.store.s3_credentials import REFUSED, Stamp, files_stamp, is_static
from neve.archive.store.url import BadUrl, S3Url, parse_store_url
from neve.extras import install_command

_MISSING = frozenset({"404", "NoSuchKey"})
_BEYOND = "InvalidRange"
#: A HEAD response has no body, so its code is the HTTP status.
_MAY_BE_CREDENTIALS = REFUSED | {"400", "401", "403"}
_NO_RIGHTS = REFUSED | {"401", "403", "AccessDenied", "Forbidden"}
T = TypeVar("T")


class BadSource(ValueError):
    """The URL is invalid, or a library that reading needs is not installed."""


class Head(NamedTuple):
    """The answer to a HEAD request. The etag is empty: a copied object would have another one."""

    size: int
    etag: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a listing."""

    key: str


class Source(Protocol):
    """A store as the archive commands and readers use it."""

    def get(self, key: str) -> bytes: ...

    def get_range(self, key: str, start: int, length: int) -> bytes: ...

    def head(self, key: str) -> Head: ...

    def list_prefixes(self, prefix: str) -> list[str]: ...

    def list(self, prefix: str) -> Iterable[Listed]: ...


def open_source(url: str) -> Source:
    """Open a store by its URL (`url`).

    Raises:
        BadSource: the URL is invalid, or boto3 is missing.
        FileNotFoundError: there is no such directory.
    """
    try:
        where = parse_store_url(url)
    except BadUrl as error:
        raise BadSource(str(error)) from error
    if isinstance(where, S3Url):
        return S3Source(where.bucket, where.prefix, where.endpoint or None, where.region or None)
    if not where.path.is_dir():
        raise FileNotFoundError(f"{where.path} is not a directory")
    return DirectorySource(where.path)


class DirectorySource:
    """A read-only directory store. Raises FileNotFoundError for a key without an object."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def get(self, key: str) -> bytes:
        return (self._root / key).read_bytes()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with (self._root / key).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def head(self, key: str) -> Head:
        return Head((self._root / key).stat().st_size)

    def list_prefixes(self, prefix: str) -> list[str]:
        folder = self._root / prefix
        if not folder.is_dir():
            return []
        return sorted(f"{prefix}{entry.name}/" for entry in folder.iterdir() if entry.is_dir())

    def list(self, prefix: str) -> Iterable[Listed]:
        folder = self._root / prefix
        files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
        return [Listed(path.relative_to(self._root).as_posix()) for path in files]


class S3Source:
    """A read-only bucket store through boto3. Thread-safe.

    Credentials are reloaded when one of their files changes and when the store refuses them; a refused request is then
    sent once more. Raises FileNotFoundError for a key without an object, and PermissionError for missing rights.
    """

    def __init__(self, bucket: str, prefix: str, endpoint: str | None, region: str | None) -> None:
        try:
            import boto3  # noqa: F401 - tests that it is installed
        except ModuleNotFoundError as missing:
            raise BadSource(f"reading an S3 store needs boto3: {install_command('archive')}") from missing
        self.bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._endpoint, self._region = endpoint, region
        self._opening = threading.Lock()
        self._stamp = files_stamp()
        self._client = self._open()

    def _open(self) -> Any:
        import boto3
        from botocore.config import Config

        style = {"addressing_style": "path"} if self._endpoint else {}
        return boto3.Session().client(
            "s3", endpoint_url=self._endpoint, region_name=self._region, config=Config(connect_timeout=5, s3=style)
        )

    def ask(self, work: Callable[[Any], T]) -> T:
        """Run requests with boto3's client; retry once with reloaded credentials if the store refuses them."""
        from botocore.exceptions import ClientError

        client = self._current()
        try:
            return work(client)
        except ClientError as error:
            if _code(error) not in _MAY_BE_CREDENTIALS or is_static():
                raise
        return work(self._instead_of(client))

    def _current(self) -> Any:
        with self._opening:
            stamp = files_stamp()
            if stamp != self._stamp and not is_static():
                self._reopen(stamp)
            return self._client

    def _instead_of(self, refused: Any) -> Any:
        with self._opening:
            if self._client is refused:
                self._reopen(files_stamp())
            return self._client

    def _reopen(self, stamp: Stamp) -> None:
        """Replace the client, unless no credentials can be read: a program may be writing the file."""
        from botocore.exceptions import BotoCoreError

        try:
            client = self._open()
        except BotoCoreError:
            return
        if client._get_credentials() is not None:
            self._client, self._stamp = client, stamp

    def name(self, key: str) -> str:
        return self._prefix + key

    def get(self, key: str) -> bytes:
        return self._read(Key=self.name(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return the bytes of the range that exist."""
        from botocore.exceptions import ClientError

        try:
            return self._read(Key=self.name(key), Range=f"bytes={start}-{start + length - 1}")
        except ClientError as error:
            if _code(error) == _BEYOND:
                return b""
            raise

    def head(self, key: str) -> Head:
        from botocore.exceptions import ClientError

        where = {"Bucket": self.bucket, "Key": self.name(key)}
        try:
            return Head(int(self.ask(lambda client: client.head_object(**where)["ContentLength"])))
        except ClientError as error:
            raise _translated(error, key) from error

    def list_prefixes(self, prefix: str) -> list[str]:
        found = (str(one["Prefix"]) for page in self._pages(prefix, "/") for one in page.get("CommonPrefixes", ()))
        return [one.removeprefix(self._prefix) for one in found]

    def list(self, prefix: str) -> Iterable[Listed]:
        found = (str(one["Key"]) for page in self._pages(prefix) for one in page.get("Contents", ()))
        return [Listed(one.removeprefix(self._prefix)) for one in found]

    def _pages(self, prefix: str, delimiter: str = "") -> Sequence[Any]:
        from botocore.exceptions import ClientError

        within = {"Bucket": self.bucket, "Prefix": self.name(prefix)} | ({"Delimiter": delimiter} if delimiter else {})
        try:
            return self.ask(lambda client: list(client.get_paginator("list_objects_v2").paginate(**within)))
        except ClientError as error:
            raise _translated(error, f"a listing of {prefix}") from error

    def _read(self, **request: str) -> bytes:
        from botocore.exceptions import ClientError

        try:
            return self.ask(lambda client: bytes(client.get_object(Bucket=self.bucket, **request)["Body"].read()))
        except ClientError as error:
            raise _translated(error, request["Key"]) from error


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _translated(error: Any, what: str) -> Exception:
    """Translate a missing object or missing rights to Python's errors; return any other error unchanged."""
    code = _code(error)
    if code in _MISSING:
        return FileNotFoundError(f"{what} is not in the store")
    if code in _NO_RIGHTS:
        return PermissionError(f"no rights: {what}: {error}")
    return error  # type: ignore[no-any-return]
