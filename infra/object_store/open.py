"""From a store's URL to the store."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from infra.object_store.directory import DirectoryStore
from infra.object_store.protocol import NO_LEASE, BadStoreUrl, ObjectStore


def open_store(url: str) -> ObjectStore:
    """`dir:PATH`, or `s3://bucket/prefix?endpoint=…&region=…&multipartAbove=BYTES`.

    Credentials come from AWS_* variables or a profile.
    """
    if url.startswith("dir:"):
        path = url.removeprefix("dir:")
        if not path:
            raise BadStoreUrl("dir: needs a path")
        return DirectoryStore(Path(path))
    parts = urlsplit(url)
    if parts.scheme != "s3":
        raise BadStoreUrl(f"storeUrl must be dir:PATH or s3://BUCKET/PREFIX, not {parts.scheme or url[:20]!r}")
    if "@" in parts.netloc:
        raise BadStoreUrl("credentials don't belong in storeUrl: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    if "fencing" in options:
        raise BadStoreUrl(f"the fence rests on the store's If-None-Match: * alone; {NO_LEASE}")
    unknown = sorted(set(options) - {"endpoint", "region", "multipartAbove"})
    if unknown:
        raise BadStoreUrl(
            f"storeUrl knows only endpoint, region and multipartAbove, not {', '.join(unknown)}; "
            "credentials come from AWS_* variables"
        )
    if not parts.netloc:
        raise BadStoreUrl("storeUrl names no bucket")
    from infra.object_store.s3 import MULTIPART_ABOVE, S3Store, parse_multipart_above  # noqa: PLC0415 - only where S3 is used

    return S3Store(
        url,
        parts.netloc,
        unquote(parts.path).strip("/"),
        endpoint=options.get("endpoint"),
        region=options.get("region"),
        multipart_above=parse_multipart_above(options["multipartAbove"])
        if "multipartAbove" in options
        else MULTIPART_ABOVE,
    )
