"""Run RocketMQ's own integration tests of pop against neve, from a checkout of its release 5.3.3.

The tests are in no registry, so `make test` does not run them.

    python -m tests.interop.stock_tests CHECKOUT
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import jvm
from tests.kit.server.neve import NeveServer

#: Tests that start no broker besides that of BaseConf, and do not inspect it.
TESTS = (
    "org.apache.rocketmq.test.client.consumer.pop.NotificationIT",
    "org.apache.rocketmq.test.offset.OffsetResetForPopIT",
)
_SOURCES = Path(__file__).parent / "java_stock"
_BROKER = "broker-a"
_COMPILE_S, _RUN_S = 180, 600


def compile_tests(checkout: Path, out: Path) -> str:
    """Compile the tests with our BaseConf in place of theirs; return the class path."""
    library = f"{jvm.jars(jvm.STOCK_TESTS)}/*"
    theirs = checkout / "test" / "src"
    places = [_SOURCES, theirs / "main" / "java", theirs / "test" / "java"]
    files = [theirs / "test" / "java" / f"{name.replace('.', '/')}.java" for name in TESTS]
    command = ["javac", "-nowarn", "-proc:none", "-d", str(out), "-cp", library]
    command += ["-sourcepath", ":".join(map(str, places)), *map(str, files)]
    subprocess.run(command, timeout=_COMPILE_S, check=True)
    return f"{out}:{library}"


def main(checkout: Path) -> int:
    """Return JUnit's exit code."""
    with tempfile.TemporaryDirectory(prefix="neve-stock-tests-") as name:
        home = Path(name)
        class_path = compile_tests(checkout, home / "classes")
        with NeveServer(home / "neve", settings={"brokerName": _BROKER}) as server:
            properties = {"namesrv": server.namesrv, "broker": server.broker, "brokerName": _BROKER}
            flags = [*jvm.CLIENT_FLAGS, *(f"-D{key}={value}" for key, value in properties.items())]
            flags.append(f"-Drocketmq.log.root={home}")
            command = jvm.java(class_path, "org.junit.runner.JUnitCore", *TESTS, home=home, flags=flags)
            return subprocess.run(command, timeout=_RUN_S, check=False, env={**os.environ, "HOME": name}).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
