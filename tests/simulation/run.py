"""`python -m tests.simulation.run 5000`, `… 100-200 --world messaging --jobs 2`: run many seeds of each world.

It prints the seeds that broke a promise, and then exits with 1. With `--summary` it saves its state in a file after
every few seeds, and a further call with the same file resumes there: seeds, steps by kind, broken promises.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulation.messaging.world import MessagingWorld
from tests.simulation.replicas.world import ReplicasWorld
from tests.simulation.world import BrokenInvariant, StorageWorld

STORAGE, MESSAGING, REPLICAS = "storage", "messaging", "replicas"
WORLDS = (STORAGE, MESSAGING, REPLICAS)
CHUNK = 20
TELL_EVERY = 500


@dataclass
class Summary:
    """The summary of one world."""

    done: list[tuple[int, int]] = field(default_factory=list)  # Ranges of seeds; the second number is exclusive.
    steps: Counter[str] = field(default_factory=Counter)
    broken: dict[int, str] = field(default_factory=dict)

    @property
    def seeds(self) -> int:
        return sum(end - first for first, end in self.done)

    def has(self, seed: int) -> bool:
        return any(first <= seed < end for first, end in self.done)

    def add(self, first: int, end: int, steps: dict[str, int], broken: dict[int, str]) -> None:
        self.steps.update(steps)
        self.broken.update(broken)
        merged: list[tuple[int, int]] = []
        for one in sorted([*self.done, (first, end)]):
            if merged and merged[-1][1] >= one[0]:
                merged[-1] = merged[-1][0], max(merged[-1][1], one[1])
            else:
                merged.append(one)
        self.done = merged

    def told(self, world: str) -> str:
        steps = ", ".join(f"{name.strip('_')} {count}" for name, count in self.steps.most_common())
        return f"{world}: {self.seeds} seeds ({steps}); broken: {sorted(self.broken) or 'none'}"


def tell(world: str, first: int, end: int) -> tuple[dict[str, int], dict[int, str]]:
    """Run the histories of some seeds, optionally in another process."""
    steps: Counter[str] = Counter()
    broken: dict[int, str] = {}
    for seed in range(first, end):
        history: StorageWorld | MessagingWorld | ReplicasWorld
        if world == STORAGE:
            history = StorageWorld(seed, real_worker=seed % 20 == 19)  # Some of them with the real encoder.
        else:
            history = MessagingWorld(seed) if world == MESSAGING else ReplicasWorld(seed)
        try:
            history.run()
        except BrokenInvariant as violation:
            broken[seed] = str(violation)
        steps.update(history.counts)
    return dict(steps), broken


def main() -> int:
    arguments = _arguments()
    first, _, end = arguments.seeds.rpartition("-")
    path = arguments.summary
    summaries = _read(path)
    chunks = [
        (world, at, min(at + CHUNK, int(end)))
        for at in range(int(first or 0), int(end), CHUNK)
        for world in arguments.world
        if not all(summaries[world].has(seed) for seed in range(at, min(at + CHUNK, int(end))))
    ]
    for number, (world, at, upto, (steps, broken)) in enumerate(_all(chunks, arguments.jobs), 1):
        summaries[world].add(at, upto, steps, broken)
        for text in broken.values():
            print(text, flush=True)
        if path is not None:
            _write(path, summaries)
        if number * CHUNK % TELL_EVERY == 0:
            print(f"{number * CHUNK} seeds, {len(broken)} of the last {CHUNK} broke a promise", flush=True)
    for world in arguments.world:
        print(summaries[world].told(world))
    return 1 if any(summaries[world].broken for world in arguments.world) else 0


def _all(
    chunks: list[tuple[str, int, int]], jobs: int
) -> Iterator[tuple[str, int, int, tuple[dict[str, int], dict[int, str]]]]:
    if jobs == 1:
        for chunk in chunks:
            yield *chunk, tell(*chunk)
        return
    with ProcessPoolExecutor(jobs) as pool:
        running: dict[Future[tuple[dict[str, int], dict[int, str]]], tuple[str, int, int]] = {}
        coming = iter(chunks)
        while True:
            while len(running) < 2 * jobs and (following := next(coming, None)) is not None:
                running[pool.submit(tell, *following)] = following
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield *running.pop(future), future.result()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run", description=__doc__)
    parser.add_argument("seeds", nargs="?", default="1000", help="how many, or from-to; the second is not among them")
    parser.add_argument("--world", action="append", choices=WORLDS, help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--summary", type=Path, help="a file that keeps what is done")
    arguments = parser.parse_args()
    arguments.world = arguments.world or list(WORLDS)
    return arguments


def _write(path: Path, summaries: dict[str, Summary]) -> None:
    told = {
        name: {"done": summary.done, "steps": dict(summary.steps), "broken": summary.broken}
        for name, summary in summaries.items()
    }
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(told, indent=1))
    temporary.replace(path)


def _read(path: Path | None) -> dict[str, Summary]:
    summaries = {name: Summary() for name in WORLDS}
    if path is not None and path.exists():
        for name, told in json.loads(path.read_text()).items():
            summaries[name] = Summary(
                [(first, end) for first, end in told["done"]],
                Counter(told["steps"]),
                {int(seed): text for seed, text in told["broken"].items()},
            )
    return summaries


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # The order of a set of names is part of a history.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.run", *sys.argv[1:]])
    sys.exit(main())
