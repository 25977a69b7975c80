"""An archive store through the JVM's Hadoop file system, with Spark's credentials and without boto3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from neve.archive.store.source import Listed
from neve.spark.builder import HadoopStore
from neve.spark.jars import SparkSetupError


class HadoopSource:
    """A source of small objects, such as the journal; only for the driver."""

    def __init__(self, spark: Any, store: HadoopStore) -> None:
        self._store = store
        self._jvm = spark.sparkContext._jvm
        self._conf = spark.sparkContext._jsc.hadoopConfiguration()
        self._fs = self._file_system(store)

    def _file_system(self, store: HadoopStore) -> Any:
        from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

        try:
            return self._path(store.root).getFileSystem(self._conf)
        except Py4JJavaError as error:
            if "ClassNotFoundException" not in str(error.java_exception):
                raise _translated(error, store.root) from error
            raise SparkSetupError(
                f"this Spark has no jars for {store.root}: call neve.spark.session(STORE) before, which adds them, "
                "or give the cluster hadoop-aws of its Hadoop version"
            ) from error

    def get(self, key: str) -> bytes:
        from py4j.protocol import Py4JJavaError

        path = self._path(self._store.path(key))
        try:
            stream = self._fs.open(path)
            try:
                return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()
        except Py4JJavaError as error:
            raise _translated(error, key) from error

    def get_range(self, key: str, start: int, length: int) -> bytes:
        from py4j.protocol import Py4JJavaError

        path = self._path(self._store.path(key))
        packages = self._jvm.org.apache.commons.io
        try:
            stream = self._fs.open(path)
            try:
                if start:
                    stream.seek(start)
                return bytes(packages.IOUtils.toByteArray(packages.input.BoundedInputStream(stream, length)))
            finally:
                stream.close()
        except Py4JJavaError as error:
            if error.java_exception.getClass().getSimpleName() == "EOFException":
                return b""
            raise _translated(error, key) from error

    def head(self, key: str) -> object:
        from py4j.protocol import Py4JJavaError

        try:
            return self._fs.getFileStatus(self._path(self._store.path(key)))
        except Py4JJavaError as error:
            raise _translated(error, key) from error

    def list_prefixes(self, prefix: str) -> list[str]:
        statuses = self._statuses(prefix)
        return [f"{prefix}{status.getPath().getName()}/" for status in statuses if status.isDirectory()]

    def list(self, prefix: str) -> Iterable[Listed]:
        return [Listed(f"{prefix}{status.getPath().getName()}") for status in self._statuses(prefix) if status.isFile()]

    def _statuses(self, prefix: str) -> Any:
        from py4j.protocol import Py4JJavaError

        try:
            return self._fs.listStatus(self._path(self._store.path(prefix.rstrip("/"))))
        except Py4JJavaError as error:
            translated = _translated(error, prefix)
            if isinstance(translated, FileNotFoundError):
                return []
            raise translated from error

    def _path(self, text: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(text)


def _translated(error: Any, key: str) -> OSError:
    """Return the Python exception for a Java one."""
    kind = error.java_exception.getClass().getSimpleName()
    text = f"{key}: {error.java_exception.getMessage()}"
    if kind == "FileNotFoundException":
        return FileNotFoundError(text)
    if kind in {"AccessDeniedException", "AWSBadRequestException", "NoAuthWithAWSException", "AccessControlException"}:
        return PermissionError(f"no rights: {text}")
    return ConnectionError(text)
