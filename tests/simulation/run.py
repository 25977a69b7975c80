"""`python -m tests.simulation.run 5000` or `… 100-200`: many seeds, one after another; says which broke a promise."""

from __future__ import annotations

import sys
from collections import Counter

from tests.simulation.world import Violation, World

TELL_EVERY = 500


def main() -> int:
    chosen = sys.argv[1] if len(sys.argv) > 1 else "1000"
    first, _, end = chosen.rpartition("-")
    seeds = range(int(first or 0), int(end))
    steps: Counter[str] = Counter()
    broken: list[int] = []
    for number, seed in enumerate(seeds, 1):
        world = World(seed, real_worker=seed % 20 == 19)
        try:
            world.run()
        except Violation as violation:
            broken.append(seed)
            print(violation, flush=True)
        steps.update(world.counts)
        if number % TELL_EVERY == 0:
            print(f"{number} seeds, {len(broken)} broke a promise", flush=True)
    told = ", ".join(f"{name.strip('_')} {count}" for name, count in steps.most_common())
    print(f"{len(seeds)} seeds ({told}); broken: {broken or 'none'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
