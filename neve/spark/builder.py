"""A Spark session with the settings of archive stores: jars, endpoints, credentials, the Python of the workers."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neve.archive.store.url import DirUrl, parse_store_url
from neve.spark.jars import find_java, pyspark_jars, s3_jars

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Environment, then the profile or role of the machine: the order of the AWS tools.
CREDENTIALS = ",".join(
    (
        "software.amazon.awssdk.auth.credentials.EnvironmentVariableCredentialsProvider",
        "software.amazon.awssdk.auth.credentials.ProfileCredentialsProvider",
        "org.apache.hadoop.fs.s3a.auth.IAMInstanceCredentialsProvider",
    )
)

OF_SESSIONS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
}


@dataclass(frozen=True, slots=True)
class HadoopStore:
    """An archive store as a path of a Hadoop file system.

    `scheme` is "dir" or "s3"; `root` is the path of the store, without a slash at the end.
    """

    scheme: str
    root: str
    bucket: str = ""
    endpoint: str = ""
    region: str = ""

    def path(self, key: str) -> str:
        return f"{self.root}/{key}"


def parse_store(url: str) -> HadoopStore:
    """Parse a store's URL. Raises ValueError."""
    where = parse_store_url(url)
    if isinstance(where, DirUrl):
        # not as_uri(): Hadoop does not decode %XX in a path
        return HadoopStore("dir", f"file:{where.path.absolute()}")
    root = f"s3a://{where.bucket}" + (f"/{where.prefix}" if where.prefix else "")
    return HadoopStore("s3", root, where.bucket, where.endpoint, where.region)


def s3_options(store: HadoopStore) -> dict[str, str]:
    """Return Hadoop's options for one bucket; a session can have several."""
    prefix = f"spark.hadoop.fs.s3a.bucket.{store.bucket}"
    options = {f"{prefix}.aws.credentials.provider": CREDENTIALS}
    options[f"{prefix}.endpoint.region"] = store.region or os.environ.get("AWS_REGION") or "us-east-1"
    # Hadoop's newer default, "analytics", caches on the heap: a scan of 7 GB exhausted a driver of 1 GB.
    options[f"{prefix}.input.stream.type"] = "classic"
    if store.endpoint:
        options[f"{prefix}.endpoint"] = store.endpoint
        options[f"{prefix}.path.style.access"] = "true"
        options[f"{prefix}.connection.ssl.enabled"] = str(store.endpoint.startswith("https")).lower()
    return options


def session(
    *stores: str,
    app_name: str = "neve",
    master: str | None = None,
    jars: Sequence[str | Path] | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a Spark session that reads the given archive stores.

    Args:
        stores: URLs; a session for buckets gets the jars and settings of S3.
        master: of a session on this machine, such as "local[2]"; by default Spark's own setting, else "local[*]".
        jars: jars for S3, instead of those that neve fetches from a Maven repository.
        conf: Spark settings; they override those of this function.

    Raises:
        SparkSetupError: Java, pyspark or jars are missing.
    """
    remote = os.environ.get("SPARK_REMOTE", "")
    is_served = remote.startswith("sc:")  # the server has a Java, jars and S3 settings of its own
    if not is_served:
        find_java()
        pyspark_jars()
    # PySpark warns of pandas 3, with which neve's tests run.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
    from pyspark.sql import SparkSession

    # Workers would otherwise start the first python3 on PATH, which may not have pyarrow.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app_name)
    master = master or (None if remote or "MASTER" in os.environ else "local[*]")
    if master:
        builder = builder.master(master)
        if master.startswith("local"):
            # Driver and workers are on this machine; Spark would otherwise look for another address, and warn.
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    options = OF_SESSIONS | dict(conf or {}) if is_served else _options(map(parse_store, stores), jars, conf or {})
    for name, value in options.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    if not remote:
        _configure_running(spark, options)
    return spark


def is_remote(spark: SparkSession) -> bool:
    """Return whether the session is of Spark Connect, whose JVM cannot be reached from here."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def _options(
    stores: Iterable[HadoopStore], jars: Sequence[str | Path] | None, conf: Mapping[str, str]
) -> dict[str, str]:
    options = OF_SESSIONS | {"spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower()}
    buckets = [store for store in stores if store.scheme == "s3"]
    for bucket in buckets:
        options |= s3_options(bucket)
    chosen = jars if jars is not None else (s3_jars() if buckets else [])
    if chosen:
        options["spark.jars"] = ",".join(str(jar) for jar in chosen)
    return options | dict(conf)


def _configure_running(spark: SparkSession, options: Mapping[str, str]) -> None:
    """Give jars and Hadoop's options to a JVM that ran before: that of an earlier session, or of spark-submit.

    Spark takes them from the configuration only when it starts a JVM.
    """
    context: Any = spark.sparkContext
    hadoop = context._jsc.hadoopConfiguration()
    for name, value in options.items():
        if name.startswith(_HADOOP):
            hadoop.set(name.removeprefix(_HADOOP), value)
    jars = [jar for jar in options.get("spark.jars", "").split(",") if jar]
    if not jars or hadoop.getClassByNameOrNull(_S3A) is not None:
        return
    urls = context._gateway.new_array(context._jvm.java.net.URL, len(jars))
    for at, jar in enumerate(jars):
        urls[at] = context._jvm.java.io.File(jar).toURI().toURL()
        context._jsc.addJar(jar)  # for the executors
    # Hadoop remembers per class loader which classes are missing, so it gets another one.
    before = context._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    hadoop.setClassLoader(context._jvm.java.net.URLClassLoader(urls, before))


_HADOOP = "spark.hadoop."
_S3A = "org.apache.hadoop.fs.s3a.S3AFileSystem"
