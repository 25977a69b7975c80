"""Java for tests and benchmarks: jars by Maven, small programs by javac, processes by java.

~/.cache/neve/jars/
  server-5.3.3/   the whole of Apache RocketMQ: name server, broker, client, tools
  client-4.9.8/   the last client of the 4.x line, which most installations still run
  proxy-5.3.3/    Apache's gRPC proxy
  stock-tests-5.3.3/  the libraries of RocketMQ's own integration tests
  classes-*/      our own programs, named by a hash of their sources and of the jars that they were compiled against
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVER = "server-5.3.3"
CLIENT_OLD = "client-4.9.8"
PROXY = "proxy-5.3.3"
STOCK_TESTS = "stock-tests-5.3.3"
_GROUP = "org.apache.rocketmq"
_ARTIFACTS = {
    SERVER: ["rocketmq-namesrv", "rocketmq-broker", "rocketmq-client", "rocketmq-tools"],
    CLIENT_OLD: ["rocketmq-client", "rocketmq-tools"],
    PROXY: ["rocketmq-proxy"],
    STOCK_TESTS: [
        *("rocketmq-namesrv", "rocketmq-broker", "rocketmq-client", "rocketmq-tools", "junit:junit:4.13.2"),
        *("com.google.truth:truth:0.30", "org.assertj:assertj-core:3.22.0", "org.awaitility:awaitility:4.1.0"),
    ],
}
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
_FETCH_TIMEOUT_S = 900

#: A client lives for seconds: the serial collector and the C1 compiler halve its start time.
CLIENT_FLAGS = ["-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
_COMMON_FLAGS = ["-XX:-UsePerfData", "-Djava.net.preferIPv4Stack=true", "-Drocketmq.client.logLevel=ERROR"]


def cache_dir() -> Path:
    """Return the directory of the jars, outside the tree, so that `make clean` does not delete them."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "neve" / "jars"


@contextmanager
def _locked(name: str) -> Iterator[Path]:
    """Lock `name`: one process fetches or compiles it; the others wait and find it done."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield cache_dir() / name


def _pom(name: str) -> str:
    version = name.rpartition("-")[2]
    places = [artifact.split(":") if ":" in artifact else [_GROUP, artifact, version] for artifact in _ARTIFACTS[name]]
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{number}</version></dependency>"
        for group, artifact, number in places
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        f"<groupId>neve</groupId><artifactId>{name}</artifactId><version>1</version><packaging>pom</packaging>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )


def jars(name: str = SERVER) -> Path:
    """Return the directory with all jars of `name`, fetched by Maven the first time."""
    with _locked(name) as home:
        if (home / ".complete").exists():
            return home
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        pom = home / "pom.xml"
        pom.write_text(_pom(name))
        command = [
            "mvn",
            "-q",
            "-B",
            "-ntp",
            "-f",
            str(pom),
            _COPY,
            f"-DoutputDirectory={home}",
            "-DincludeScope=runtime",
        ]
        _checked(command, _FETCH_TIMEOUT_S)
        (home / ".complete").touch()
        return home


def classes(sources: Path, name: str = SERVER) -> str:
    """Compile every .java file in `sources` against the jars of `name`; return the class path."""
    library = jars(name)
    files = sorted(sources.glob("*.java"))
    digest = hashlib.sha256(name.encode())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    with _locked(f"classes-{digest.hexdigest()[:16]}") as out:
        if not (out / ".complete").exists():
            shutil.rmtree(out, ignore_errors=True)
            command = ["javac", "-nowarn", "-proc:none", "-Xlint:-deprecation", "-d", str(out), "-cp", f"{library}/*"]
            _checked([*command, *map(str, files)], 120)
            (out / ".complete").touch()
    return f"{out}:{library}/*"


def java(class_path: str, main: str, *args: str, home: Path, flags: list[str] | None = None) -> list[str]:
    """Return the command line of a Java program; its logs and offsets are below `home`, not in the user's own."""
    chosen = CLIENT_FLAGS if flags is None else flags
    return ["java", *chosen, *_COMMON_FLAGS, f"-Duser.home={home}", "-cp", class_path, main, *args]


def _checked(command: list[str], timeout: float) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed ({done.returncode}): {done.stdout[-2000:]}{done.stderr[-2000:]}")
