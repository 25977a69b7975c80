"""Where a table lies: a directory or a bucket, as its log needs one. Spark itself writes and reads what is large.

All that decides something is `put_new`: of several that put the same key one succeeds, and what is there is whole.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any, Protocol

from neve.archive.store.source import BadSource, S3Source
from neve.archive.store.url import BadUrl, DirUrl, parse_store_url
from neve.entropy import Entropy, system_entropy, unique_name

_EXISTS = frozenset({"412", "PreconditionFailed"})
_MISSING = frozenset({"404", "NoSuchKey"})
#: Another request for the key was in progress, and S3 stored nothing: the request is sent again.
_CONFLICT = frozenset({"409", "ConditionalRequestConflict"})
_CONFLICT_PAUSES_S = (0.05, 0.2, 0.8)


class TableStore(Protocol):
    """What a table's log asks of it; keys are relative to the table."""

    def get(self, key: str) -> bytes:
        """Raises FileNotFoundError."""
        ...

    def put_new(self, key: str, data: bytes) -> None:
        """Raises FileExistsError; two that put the same key at once do not both succeed."""
        ...

    def sizes(self, prefix: str) -> dict[str, int]:
        """Key -> bytes of all that begin with it."""
        ...

    def settle(self, key: str) -> None:
        """From here on it outlives a power cut."""
        ...

    def move(self, source: str, target: str) -> None:
        """Done already where the target is there: it is never replaced. Raises FileNotFoundError: neither is."""
        ...

    def delete(self, key: str) -> None:
        """What is not there is fine."""
        ...

    def delete_below(self, prefix: str) -> None:
        """All keys that begin with it, which ends in a slash."""
        ...


def open_table(url: str) -> TableStore:
    """`dir:PATH` or `s3://BUCKET/PREFIX?endpoint=URL&region=NAME`. Raises BadSource."""
    try:
        where = parse_store_url(url)
    except BadUrl as error:
        raise BadSource(str(error).replace("storeUrl", "the table's URL")) from error
    if isinstance(where, DirUrl):
        return DirectoryTable(where.path)
    return BucketTable(S3Source(where.bucket, where.prefix, where.endpoint or None, where.region or None))


class DirectoryTable:
    """Of a disk that the driver and the machines of all tasks share."""

    def __init__(self, root: Path, entropy: Entropy = system_entropy) -> None:
        self._root, self._entropy = root, entropy

    def get(self, key: str) -> bytes:
        return (self._root / key).read_bytes()

    def put_new(self, key: str, data: bytes) -> None:
        target = self._root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.parent / f".{unique_name(self._entropy)}"
        try:
            # not tempfile's: who reads the table is to read its list, with the rights that all its files have
            with aside.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(aside, target)
        finally:
            aside.unlink(missing_ok=True)
        _sync(target.parent, os.O_RDONLY | os.O_DIRECTORY)

    def sizes(self, prefix: str) -> dict[str, int]:
        folder, _, begin = prefix.rpartition("/")
        roots = sorted((self._root / folder).glob(f"{begin}*")) if (self._root / folder).is_dir() else []
        files = [path for root in roots for path in ([root] if root.is_file() else sorted(root.rglob("*")))]
        return {path.relative_to(self._root).as_posix(): path.stat().st_size for path in files if path.is_file()}

    def settle(self, key: str) -> None:
        _sync(self._root / key, os.O_RDONLY)

    def move(self, source: str, target: str) -> None:
        begin, end = self._root / source, self._root / target
        end.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(begin, end)
        except FileExistsError:
            pass
        except FileNotFoundError:
            if not end.exists():
                raise
        begin.unlink(missing_ok=True)
        _sync(end.parent, os.O_RDONLY | os.O_DIRECTORY)

    def delete(self, key: str) -> None:
        (self._root / key).unlink(missing_ok=True)

    def delete_below(self, prefix: str) -> None:
        if (self._root / prefix).is_dir():
            shutil.rmtree(self._root / prefix)


def _sync(path: Path, flags: int) -> None:
    number = os.open(path, flags)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class BucketTable:
    """Of a store that honours If-None-Match."""

    def __init__(self, source: S3Source) -> None:
        self._source = source

    def _place(self, key: str) -> dict[str, str]:
        return {"Bucket": self._source.bucket, "Key": self._source.name(key)}

    def get(self, key: str) -> bytes:
        return self._source.get(key)

    def put_new(self, key: str, data: bytes) -> None:
        from botocore.exceptions import ClientError

        for pause_s in (*_CONFLICT_PAUSES_S, None):
            try:
                self._source.ask(lambda client: client.put_object(**self._place(key), Body=data, IfNoneMatch="*"))
                return
            except ClientError as error:
                if _code(error) in _EXISTS:
                    raise FileExistsError(key) from error
                if _code(error) not in _CONFLICT or pause_s is None:
                    raise
                time.sleep(pause_s)

    def sizes(self, prefix: str) -> dict[str, int]:
        root, within = self._source.name(""), {"Bucket": self._source.bucket, "Prefix": self._source.name(prefix)}
        pages = self._source.ask(lambda client: list(client.get_paginator("list_objects_v2").paginate(**within)))
        found = (one for page in pages for one in page.get("Contents", ()))
        return {str(one["Key"]).removeprefix(root): int(one["Size"]) for one in found}

    def settle(self, key: str) -> None:
        """The store has said that it has it."""

    def move(self, source: str, target: str) -> None:
        from botocore.exceptions import ClientError

        begin = self._place(source)
        if target not in self.sizes(target):
            try:
                self._source.ask(lambda client: client.copy_object(**self._place(target), CopySource=begin))
            except ClientError as error:
                if _code(error) not in _MISSING:
                    raise
                self._source.head(target)  # another has done it meanwhile
        self._source.ask(lambda client: client.delete_object(**begin))

    def delete(self, key: str) -> None:
        self._source.ask(lambda client: client.delete_object(**self._place(key)))

    def delete_below(self, prefix: str) -> None:
        for key in self.sizes(prefix):
            self.delete(key)


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
