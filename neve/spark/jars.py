"""The jars with which Spark reads S3, matched to the Hadoop that this pyspark carries.

`hadoop-aws` must be of exactly Spark's Hadoop version, and the AWS SDK of the version that it was built with. Its
declared dependency is the SDK's bundle of 650 MB; the three modules that it uses weigh 15 MB. Ivy, which pyspark
brings along, first tells the SDK's version from the metadata alone, then fetches the modules, once per Hadoop version.
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

SDK = "software.amazon.awssdk"
SDK_MODULES = ("s3", "s3-transfer-manager", "sts")
# What pyspark/jars already holds: a second version beside it would be a lottery of the class path.
IN_SPARK = ("io.netty", "org.slf4j", "org.apache.httpcomponents", "commons-codec", "commons-logging")
RESOLVE_TIMEOUT = 600
JAVA_OLDEST = 17


class SparkSetupError(RuntimeError):
    """Something that Spark needs is missing on this machine; the text says what to install."""


def find_java() -> str:
    """The java that Spark will start, or an error that says what to do."""
    home = os.environ.get("JAVA_HOME")
    candidate = Path(home, "bin", "java") if home else None
    found = str(candidate) if candidate is not None and candidate.exists() else shutil.which("java")
    if found is None:
        raise SparkSetupError(
            "Spark needs Java 17 or 21 and none was found: install one (Debian: apt install openjdk-17-jre-headless, "
            "macOS: brew install openjdk@17) or point JAVA_HOME at it"
        )
    version = java_version(Path(found))
    if version is not None and version < JAVA_OLDEST:
        raise SparkSetupError(f"Spark needs Java 17 or 21, and {found} is Java {version}: point JAVA_HOME at another")
    return found


def java_version(java: Path) -> int | None:
    """The number that Java goes by, from the file `release` of its home; None: it has none that tells."""
    try:
        told = (java.resolve().parent.parent / "release").read_text("utf-8", "replace")
    except OSError:
        return None
    found = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', told, re.MULTILINE)
    return None if found is None else int(found[1])


def pyspark_jars() -> Path:
    """The folder of jars of the Spark that will run: SPARK_HOME's, as for pyspark itself, else that of the package.

    Below `spark-submit` the package is one file, python/lib/pyspark.zip, and SPARK_HOME says where its Spark is.
    """
    try:
        import pyspark
    except ImportError as missing:
        raise SparkSetupError(f"pyspark is not installed: {install_command('spark')}") from missing
    home = os.environ.get("SPARK_HOME")
    return (Path(home) if home else Path(str(pyspark.__file__)).parent) / "jars"


def hadoop_version(jars: Path) -> str:
    """Spark's Hadoop version, read from the name of its client jar."""
    for jar in sorted(jars.glob("hadoop-client-api-*.jar")):
        found = re.fullmatch(r"hadoop-client-api-(\d[\w.-]*)\.jar", jar.name)
        if found:
            return found[1]
    if not jars.is_dir():
        raise SparkSetupError(f"Spark's jars are not at {jars}: set SPARK_HOME, or pass session(..., jars=[...])")
    raise SparkSetupError(
        f"no hadoop-client-api jar in {jars}: this Spark comes without Hadoop; pass hadoop-aws and what it needs, "
        "of the Hadoop that it runs with, as session(..., jars=[...])"
    )


def s3_jars(cache: Path | None = None) -> list[Path]:
    """Paths of the jars for s3a, fetched on first use into ~/.cache/neve/spark-jars/HADOOP_VERSION."""
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
            # another process was quicker; its folder holds the same jars
            if not target.is_dir():
                raise


class _Ivy:
    def __init__(self, jars: Path, cache: Path) -> None:
        found = sorted(jars.glob("ivy-*.jar"))
        if not found:
            raise SparkSetupError(f"no ivy jar in {jars}: fetch hadoop-aws by hand and pass jars=[...]")
        self._command = [find_java(), "-jar", str(found[-1]), "-cache", str(cache), "-confs", "default"]
        settings = os.environ.get("NEVE_IVY_SETTINGS")  # a company's own mirror
        if settings:
            self._command += ["-settings", settings]

    def sdk_version(self, hadoop: str, work: Path) -> str:
        """The SDK that this hadoop-aws was built with: metadata only, the bundle is not downloaded."""
        text = self._run(self._module(work, [("org.apache.hadoop", "hadoop-aws", hadoop)], []), ["-types", "pom"])
        found = re.search(rf"found {re.escape(SDK)}#bundle;(\S+)", text)
        if found is None:
            raise SparkSetupError(f"hadoop-aws {hadoop} names no AWS SDK:\n{text[-2000:]}")
        return found[1]

    def retrieve(self, hadoop: str, sdk: str, work: Path, into: Path) -> None:
        wanted = [("org.apache.hadoop", "hadoop-aws", hadoop), *((SDK, name, sdk) for name in SDK_MODULES)]
        module = self._module(work, wanted, [(SDK, "bundle"), *((org, "*") for org in IN_SPARK)])
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
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=RESOLVE_TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired as late:
            raise SparkSetupError(f"the jars for S3 were not fetched within {RESOLVE_TIMEOUT} s") from late
        text = done.stdout.decode("utf-8", "replace")
        if done.returncode != 0:
            raise SparkSetupError(f"the jars for S3 could not be fetched (Ivy exit {done.returncode}):\n{text[-2000:]}")
        return text
