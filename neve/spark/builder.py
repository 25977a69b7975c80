"""A Spark session that is set up for one archive store: jars, endpoint, credentials, Python of the workers."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neve.archive.store.url import DirUrl, parse_store_url
from neve.spark.jars import find_java, pyspark_jars, s3_jars

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Environment, then the profile or role of the machine: the order of the AWS tools. Never keys in the notebook.
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
    """An archive store as a Hadoop file system sees it."""

    scheme: str  # "dir" or "s3"
    root: str  # what stands before a key, without a slash at the end
    bucket: str = ""
    endpoint: str = ""
    region: str = ""

    def path(self, key: str) -> str:
        return f"{self.root}/{key}"


def parse_store(url: str) -> HadoopStore:
    """Parse a store URL (`neve.archive.store.url`) for Hadoop. Raises ValueError."""
    where = parse_store_url(url)
    if isinstance(where, DirUrl):
        # not as_uri(): Hadoop takes a path's text as it is, %XX included
        return HadoopStore("dir", f"file:{where.path.absolute()}")
    root = f"s3a://{where.bucket}" + (f"/{where.prefix}" if where.prefix else "")
    return HadoopStore("s3", root, where.bucket, where.endpoint, where.region)


def s3_options(store: HadoopStore) -> dict[str, str]:
    """Hadoop's options for this bucket alone, so that one session can read several stores."""
    prefix = f"spark.hadoop.fs.s3a.bucket.{store.bucket}"
    options = {f"{prefix}.aws.credentials.provider": CREDENTIALS}
    options[f"{prefix}.endpoint.region"] = store.region or os.environ.get("AWS_REGION") or "us-east-1"
    # Hadoop's newer default, "analytics", keeps what it read on the heap: 7 GB of archive ended a 1 GB driver.
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
    """A Spark session that can read the given archive stores.

    `master` is for a session on this machine, such as "local[2]"; without it Spark's own setting holds. `jars` replaces
    the automatic choice of jars for S3. `conf` has the last word.
    """
    remote = os.environ.get("SPARK_REMOTE", "")
    is_served = remote.startswith("sc:")  # another machine's JVM: it has its own Java, jars and ways to the store
    if not is_served:
        find_java()
        pyspark_jars()
    # PySpark warns of every pandas 3, with which neve's tests run.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
    from pyspark.sql import SparkSession

    # The workers would otherwise start the first python3 on PATH, which need not have pyarrow.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app_name)
    master = master or (None if remote or "MASTER" in os.environ else "local[*]")
    if master:
        builder = builder.master(master)
        if master.startswith("local"):
            # Driver and workers are on this machine: Spark need not look for another address, nor warn that it did.
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    parsed = [parse_store(url) for url in stores]
    options = OF_SESSIONS | dict(conf or {}) if is_served else _options(parsed, jars, conf or {})
    for name, value in options.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    if not remote:
        _reach(spark, options)
    return spark


def is_remote(spark: SparkSession) -> bool:
    """Whether it is Spark Connect's: the JVM is the server's, and nothing of it can be asked from here."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def _reach(spark: SparkSession, options: Mapping[str, str]) -> None:
    """Gives jars and Hadoop's options to a JVM that was up before: another session's, or spark-submit's.

    Spark takes them from the configuration only when it starts one; a session that came later met no S3AFileSystem.
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
        context._jsc.addJar(jar)  # of the executors
    # A loader of its own: Hadoop remembers by loader which classes it did not find.
    before = context._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    hadoop.setClassLoader(context._jvm.java.net.URLClassLoader(urls, before))


_HADOOP = "spark.hadoop."
_S3A = "org.apache.hadoop.fs.s3a.S3AFileSystem"


def _options(
    stores: Sequence[HadoopStore], jars: Sequence[str | Path] | None, conf: Mapping[str, str]
) -> dict[str, str]:
    options = OF_SESSIONS | {"spark.ui.showConsoleProgress": "false"}
    remote = [store for store in stores if store.scheme == "s3"]
    for store in remote:
        options |= s3_options(store)
    chosen = jars if jars is not None else (s3_jars() if remote else [])
    if chosen:
        options["spark.jars"] = ",".join(str(jar) for jar in chosen)
    return options | dict(conf)
