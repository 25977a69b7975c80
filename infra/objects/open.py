"""Open the object store of a URL."""

from __future__ import annotations

from infra.objects.directory import DirectoryStore
from infra.objects.store import BadStoreUrl, ObjectStore
from neve.archive.store.url import DirUrl, parse_store_url


def open_store(url: str) -> ObjectStore:
    """Open the store of a URL; `neve.archive.store.url` documents the format. Raises BadStoreUrl."""
    try:
        where = parse_store_url(url)
        if isinstance(where, DirUrl):
            return DirectoryStore(where.path)
        from infra.objects.s3 import MULTIPART_ABOVE, S3Store  # noqa: PLC0415 - only where S3 is used

        return S3Store(
            url,
            where.bucket,
            where.prefix,
            endpoint=where.endpoint or None,
            region=where.region or None,
            multipart_above=where.multipart_above or MULTIPART_ABOVE,
        )
    except ValueError as error:  # BadUrl, and what obstore refuses
        raise BadStoreUrl(next(iter(str(error).splitlines()), type(error).__name__)) from error
