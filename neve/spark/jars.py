"""The Java that Spark needs on this machine, and the jars with which it reads S3.

`hadoop-aws` must have exactly the version of Spark's Hadoop, and the AWS SDK the version that it was built with. It
depends on the bundle of the SDK, 650 MB; the three modules that it uses have 15 MB. Ivy, which pyspark contains, finds
the version of the SDK in the metadata and fetches the modules, once per Hadoop version. Spark's `spark.jars.packages`
would resolve them at each start, with some 150 lines on stderr, and has no effect in a JVM that runs already.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from neve.extras import install_command

_SDK = "software.amazon.awssdk"
_SDK_MODULES = ("s3", "s3-transfer-manager", "sts")
#: pyspark/jars has its own versions of these.
_IN_SPARK = ("io.netty", "org.slf4j", "org.apache.httpcomponents", "commons-codec", "commons-logging")
_RESOLVE_TIMEOUT_S = 600
_OLDEST_JAVA = 17


class SparkSetupError(RuntimeError):
    """Spark cannot run on this machine; the message has the remedy."""


def find_java() -> str:
    """Return the path of the Java that Spark will start.

    Raises:
        SparkSetupError: there is none, or it is too old.
    """
    home = os.environ.get("JAVA_HOME")
    candidate = Path(home, "bin", "java") if home else None
    found = str(candidate) if candidate is not None and candidate.exists() else shutil.which("java")
    if found is None:
        raise SparkSetupError(
            "Spark needs Java 17 or 21 and none was found: install one (Debian: apt install openjdk-17-jre-headless, "
            "macOS: brew install openjdk@17) or point JAVA_HOME at it"
        )
    version = java_version(Path(found))
    if version is not None and version < _OLDEST_JAVA:
        raise SparkSetupError(f"Spark needs Java 17 or 21, and {found} is Java {version}: point JAVA_HOME at another")
    return found


def java_version(java: Path) -> int | None:
    """Return the major version of a Java from the file `release` in its home, or None without such a file."""
    try:
        release = (java.resolve().parent.parent / "release").read_text("utf-8", "replace")
    except OSError:
        return None
    found = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', release, re.MULTILINE)
    return None if found is None else int(found[1])


def pyspark_jars() -> Path:
    """Return the directory of Spark's jars: that of SPARK_HOME, else that of the installed pyspark.

    Below `spark-submit` pyspark is imported from python/lib/pyspark.zip, which contains no jars.
    """
    try:
        import pyspark
    except ImportError as missing:
        raise SparkSetupError(f"pyspark is not installed: {install_command('spark')}") from missing
    home = os.environ.get("SPARK_HOME")
    return (Path(home) if home else Path(str(pyspark.__file__)).parent) / "jars"


def hadoop_version(jars: Path) -> str:
    """Return the version of Spark's Hadoop, from the name of its client jar."""
    for jar in sorted(jars.glob("hadoop-client-api-*.jar")):
        found = re.fullmatch(r"hadoop-client-api-(\d[\w.-]*)\.jar", jar.name)
        if found:
            return found[1]
    if not jars.is_dir():
        raise SparkSetupError(f"Spark's jars are not at {jars}: set SPARK_HOME, or pass session(..., jars=[...])")
    raise SparkSetupError(
        f"no hadoop-client-api jar in {jars}: this Spark comes without Hadoop; pass hadoop-aws of the Hadoop that it "
        "runs with, and its dependencies, as session(..., jars=[...])"
    )


def s3_jars(cache: Path | None = None) -> list[Path]:
    """Return the jars for s3a; the first call fetches them into ~/.cache/neve/spark-jars/HADOOP_VERSION."""
    jars = pyspark_jars()
    version = hadoop_version(jars)
    root = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neve" / "spark-jars"
    target = root / version
    if not target.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        _fetch(jars, version, root, target)
    return sorted(target.glob("*.jar"))


def _fetch(jars: Path, version: str, root: Path, target: Path) -> None:
    ivy = _Ivy(jars, root / "ivy")
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        work = Path(scratch)
        sdk = ivy.sdk_version(version, work)
        complete = work / "jars"
        ivy.retrieve(version, sdk, work, complete)
        try:
            complete.rename(target)
        except OSError:
            # Another process was faster; its directory contains the same jars.
            if not target.is_dir():
                raise


class _Ivy:
    def __init__(self, jars: Path, cache: Path) -> None:
        found = sorted(jars.glob("ivy-*.jar"))
        if not found:
            raise SparkSetupError(f"no ivy jar in {jars}: fetch hadoop-aws and pass session(..., jars=[...])")
        self._command = [find_java(), "-jar", str(found[-1]), "-cache", str(cache), "-confs", "default"]
        settings = os.environ.get("NEVE_IVY_SETTINGS")
        if settings:
            self._command += ["-settings", settings]

    def sdk_version(self, hadoop: str, work: Path) -> str:
        """Return the version of the SDK that this hadoop-aws was built with; the bundle is not downloaded."""
        text = self._run(self._module(work, [("org.apache.hadoop", "hadoop-aws", hadoop)], []), ["-types", "pom"])
        found = re.search(rf"found {re.escape(_SDK)}#bundle;(\S+)", text)
        if found is None:
            raise SparkSetupError(
                f"Ivy found no AWS SDK among the dependencies of hadoop-aws {hadoop}:\n{text[-2000:]}"
            )
        return found[1]

    def retrieve(self, hadoop: str, sdk: str, work: Path, into: Path) -> None:
        wanted = [("org.apache.hadoop", "hadoop-aws", hadoop), *((_SDK, name, sdk) for name in _SDK_MODULES)]
        module = self._module(work, wanted, [(_SDK, "bundle"), *((org, "*") for org in _IN_SPARK)])
        pattern = f"{into}/[organisation]_[artifact]-[revision].[ext]"
        self._run(module, ["-types", "jar", "bundle", "-retrieve", pattern])
        if not any(into.glob("*_hadoop-aws-*.jar")):
            raise SparkSetupError(f"Ivy fetched no hadoop-aws {hadoop}")

    def _module(self, work: Path, wanted: Sequence[tuple[str, str, str]], unwanted: Sequence[tuple[str, str]]) -> Path:
        root = ET.Element("ivy-module", version="2.0")
        ET.SubElement(root, "info", organisation="neve", module="spark-jars")
        ET.SubElement(ET.SubElement(root, "configurations"), "conf", name="default")
        dependencies = ET.SubElement(root, "dependencies")
        for org, name, rev in wanted:
            ET.SubElement(dependencies, "dependency", org=org, name=name, rev=rev, conf="default->default")
        for org, module in unwanted:
            ET.SubElement(dependencies, "exclude", org=org, module=module)
        path = work / "ivy.xml"
        ET.ElementTree(root).write(path)
        return path

    def _run(self, module: Path, options: list[str]) -> str:
        command = [*self._command, "-ivy", str(module), *options]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_RESOLVE_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as late:
            raise SparkSetupError(f"the jars for S3 were not fetched within {_RESOLVE_TIMEOUT_S} s") from late
        text = done.stdout.decode("utf-8", "replace")
        if done.returncode != 0:
            raise SparkSetupError(f"the jars for S3 could not be fetched (Ivy exit {done.returncode}):\n{text[-2000:]}")
        return text
