"""`python -m tests.simulation.year.run`: a year of a broker with ten thousand topics; `--small`: weeks.

It exits with 1 if a figure grows without bound, or if the archive is incomplete at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import sys
import time

from tests.simulation.year.figures import growing, told
from tests.simulation.year.world import SMALL, YEAR, YearWorld


def main() -> int:
    arguments = _arguments()
    size = SMALL if arguments.small else YEAR
    chosen = {name: value for name in ("days", "topics", "messages") if (value := getattr(arguments, name)) is not None}
    size = dataclasses.replace(size, **chosen)
    world = YearWorld(size, arguments.seed)
    days, every, began = [], arguments.every, time.process_time()
    try:
        for figures in world.run():
            days.append(figures)
            if figures.day % every == 0 or figures.day == size.days:
                print(f"{told(figures)}  CPU {time.process_time() - began:,.0f} s", flush=True)
        report = world.verify()
        problems = report.problems + [f"{key}: nothing vouches for it" for key in world.orphans()]
        problems += [f"{message} is lost" for message in world.lost()]
    finally:
        world.close()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"verify: {report.objects:,} objects, {report.rows:,} rows, {len(problems)} problems; {most:,.0f} MB at most")
    for text in problems[:20]:
        print(f"  {text}")
    found = growing(days, size.slack)
    print("grows:", *(f"\n  {text}" for text in found or ["nothing"]), sep="")
    return 1 if problems or found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.year.run", description=__doc__)
    parser.add_argument("--small", action="store_true", help="some weeks of some hundred topics")
    parser.add_argument("--days", type=int)
    parser.add_argument("--topics", type=int)
    parser.add_argument("--messages", type=int, help="a day")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=28, help="days between two lines")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
