"""The URL of a store, for the broker, the reader, the command line and Spark.

    dir:PATH
    s3://BUCKET/PREFIX?endpoint=URL&region=NAME&multipartAbove=BYTES

%XX in the prefix and in options is decoded. A URL is refused if programs could interpret one of its parts differently.
It contains no credentials: they come from AWS_* variables, a profile or the machine's role.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

# A write that was sent under a lease may take effect after it, over an entry of the next owner; no clock prevents that.
NO_LEASE = "a lease cannot replace it (fencing=lease is not offered: see docs/dev/archive-design.md)"
#: S3 accepts no part below 5 MiB, except the last, and no single PUT above 5 GiB.
MULTIPART_ABOVE_MIN, MULTIPART_ABOVE_MAX = 5 << 20, 5 << 30
_OPTIONS = ("endpoint", "region", "multipartAbove")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REGION = re.compile(r"[A-Za-z0-9._-]+")


class BadUrl(ValueError):
    """The URL does not identify a store, or contains a part that is not allowed."""


@dataclass(frozen=True, slots=True)
class DirUrl:
    """A directory as store."""

    path: Path

    @property
    def uri(self) -> str:
        """The root as other programs address it; `/` and a key follow."""
        return f"file://{self.path.absolute()}"


@dataclass(frozen=True, slots=True)
class S3Url:
    """A bucket and a prefix; an option that the URL lacks is empty or 0."""

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    multipart_above: int = 0

    @property
    def uri(self) -> str:
        """The root as other programs address it; `/` and a key follow."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


def parse_store_url(url: str) -> DirUrl | S3Url:
    """Parse a store URL. Raises BadUrl, whose text names the refused part and contains no secret."""
    if _CONTROL.search(url):
        raise BadUrl("storeUrl has a control character")
    if url.startswith("dir:"):
        return DirUrl(_directory(url.removeprefix("dir:")))
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise BadUrl("storeUrl is no URL") from error  # its text may repeat a secret
    if parts.scheme != "s3":
        raise BadUrl(f"storeUrl must be dir:PATH or s3://BUCKET/PREFIX, not {parts.scheme or url[:20]!r}")
    if "@" in parts.netloc:
        raise BadUrl("credentials don't belong in storeUrl: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if "#" in url:
        raise BadUrl("storeUrl has a #, which would end it there: write %23 for a # in the prefix")
    options = _options(parts)
    if not parts.netloc:
        raise BadUrl("storeUrl names no bucket")
    if not _BUCKET.fullmatch(parts.netloc):
        raise BadUrl("storeUrl: the bucket's name may have letters, digits, '.', '-' and '_' only")
    return S3Url(
        parts.netloc,
        _prefix(parts.path),
        _endpoint(options.get("endpoint")),
        _region(options.get("region")),
        _multipart_above(options.get("multipartAbove")),
    )


def _directory(path: str) -> Path:
    if not path:
        raise BadUrl("dir: needs a path")
    if path.startswith("~"):
        raise BadUrl(f"storeUrl: ~ is not replaced by a home directory; write the whole path, or dir:./{path[:20]}")
    return Path(path)


def _options(parts: SplitResult) -> dict[str, str]:
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise BadUrl("storeUrl: the part after ? is no list of NAME=VALUE") from error
    options = dict(pairs)
    if "fencing" in options:
        raise BadUrl(f"the fence rests on the store's If-None-Match: * alone; {NO_LEASE}")
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise BadUrl(
            f"storeUrl knows only endpoint, region and multipartAbove, not {', '.join(unknown)}; "
            "credentials come from AWS_* variables"
        )
    names = [name for name, _ in pairs]
    for name, value in pairs:
        if names.count(name) > 1:
            raise BadUrl(f"storeUrl: the option {name} is given {names.count(name)} times")
        if not value:
            raise BadUrl(f"storeUrl: the option {name} has no value")
        if _CONTROL.search(value):
            raise BadUrl(f"storeUrl: the option {name} has a control character")
    return options


def _prefix(path: str) -> str:
    """Return the decoded prefix without slashes around it."""
    try:
        prefix = unquote(path, errors="strict").removeprefix("/").removesuffix("/")
    except UnicodeDecodeError as error:
        raise BadUrl("storeUrl: the prefix is not UTF-8") from error
    if _CONTROL.search(prefix):
        raise BadUrl("storeUrl: the prefix has a control character")
    for part in prefix.split("/") if prefix or path not in {"", "/"} else ():
        if part in {"", ".", ".."}:
            raise BadUrl(f"storeUrl: the prefix has {'//' if not part else repr(part)}, which stores read differently")
    return prefix


def _endpoint(endpoint: str | None) -> str:
    if endpoint:
        check_endpoint(endpoint)
    return endpoint or ""


def check_endpoint(endpoint: str) -> None:
    """Check the URL of an S3 endpoint. Raises BadUrl."""
    if "@" in endpoint:
        raise BadUrl("credentials don't belong in the endpoint: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    try:
        address = urlsplit(endpoint)
        has_host = bool(address.hostname) and (address.port is None or address.port > 0)
    except ValueError as error:
        raise BadUrl("endpoint must be http(s)://HOST[:PORT], with a port below 65536") from error
    if address.scheme not in {"http", "https"} or not has_host:
        raise BadUrl(f"endpoint must be http(s)://HOST[:PORT], not {endpoint[:60]!r}")
    if "#" in endpoint or "?" in endpoint:
        raise BadUrl("endpoint must be http(s)://HOST[:PORT], without ? and #")


def _region(region: str | None) -> str:
    if region is not None and not _REGION.fullmatch(region):
        raise BadUrl(f"storeUrl: the option region is no name of a region: {region[:30]!r}")
    return region or ""


def _multipart_above(text: str | None) -> int:
    if text is None:
        return 0
    if not re.fullmatch("[0-9]{1,12}", text) or not MULTIPART_ABOVE_MIN <= int(text) <= MULTIPART_ABOVE_MAX:
        raise BadUrl(f"multipartAbove is a number of bytes from {MULTIPART_ABOVE_MIN} to {MULTIPART_ABOVE_MAX}")
    return int(text)
