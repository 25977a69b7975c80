"""A store's URL, for the broker, the reader, the command line and Spark alike.

    dir:PATH
    s3://BUCKET/PREFIX?endpoint=URL&region=NAME&multipartAbove=BYTES

Credentials never stand in it: they come from AWS_* variables, a profile or the machine's role.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

# A write that was sent under a lease may land after it, over an entry of the next owner, and no clock can prevent that.
NO_LEASE = "a lease can't replace that (fencing=lease is not offered, docs/archive-format.md says why)"
_OPTIONS = frozenset({"endpoint", "region", "multipartAbove"})


class BadUrl(ValueError):
    """The URL does not name a store, or carries what must not stand in a URL."""


@dataclass(frozen=True, slots=True)
class DirUrl:
    """A directory as store."""

    path: Path


@dataclass(frozen=True, slots=True)
class S3Url:
    """A bucket, and below which name in it; empty: what is not said."""

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    multipart_above: str = ""


def parse_store_url(url: str) -> DirUrl | S3Url:
    """Raises BadUrl, whose text repeats no secret."""
    if url.startswith("dir:"):
        path = url.removeprefix("dir:")
        if not path:
            raise BadUrl("dir: needs a path")
        return DirUrl(Path(path))
    parts = urlsplit(url)
    if parts.scheme != "s3":
        raise BadUrl(f"storeUrl must be dir:PATH or s3://BUCKET/PREFIX, not {parts.scheme or url[:20]!r}")
    if "@" in parts.netloc:
        raise BadUrl("credentials don't belong in storeUrl: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    try:
        options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise BadUrl(f"storeUrl: what stands behind ? is no list of NAME=VALUE: {error}") from error
    if "fencing" in options:
        raise BadUrl(f"the fence rests on the store's If-None-Match: * alone; {NO_LEASE}")
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise BadUrl(
            f"storeUrl knows only endpoint, region and multipartAbove, not {', '.join(unknown)}; "
            "credentials come from AWS_* variables"
        )
    if not parts.netloc:
        raise BadUrl("storeUrl names no bucket")
    endpoint = options.get("endpoint", "")
    if endpoint:
        check_endpoint(endpoint)
    prefix = unquote(parts.path).strip("/")
    return S3Url(parts.netloc, prefix, endpoint, options.get("region", ""), options.get("multipartAbove", ""))


def check_endpoint(endpoint: str) -> None:
    """Raises BadUrl."""
    address = urlsplit(endpoint)
    if address.scheme not in {"http", "https"} or not address.hostname:
        raise BadUrl(f"endpoint must be http(s)://HOST[:PORT], not {endpoint[:60]!r}")
    if "@" in address.netloc:
        raise BadUrl("credentials don't belong in the endpoint: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
