"""The whole fuzz: `python -m tests.fuzz.run --codec 10000000 --server 1000000 [--seed TEXT]`.

It prints its seed first: the same seed gives the same run. Two processes share the codec's frames; afterwards the
server gets its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests.fuzz import codec_target, corpus, made
from tests.fuzz.mutate import Mutator, seeds_of
from tests.fuzz.server_target import Siege

PROCESSES = 2
#: Frames of one mutator: a failure is reproduced with its batch alone.
BATCH = 10_000
BATCHES_TOLD = 50
MIB = 1 << 20
FRAMES_TOLD = 50_000
CODEC_GROWTH, SERVER_GROWTH = 64 * MIB, 512 * MIB


def everything() -> list[corpus.Recorded]:
    """Return the recorded and the hand-made frames."""
    return [*corpus.load(), *made.recorded()]


def codec_batches(seed: str, first: int, frames: int, step: int = 1) -> codec_target.CodecFigures:
    """Run the batches `first`, `first + step`, … of a run of that many frames."""
    seeds, figures = seeds_of(everything()), codec_target.CodecFigures()
    for batch in range(first, -(-frames // BATCH), step):
        name = f"{seed}/{batch}"
        try:
            codec_target.run(Mutator(name, seeds), min(BATCH, frames - batch * BATCH), figures)
        except Exception as error:
            error.add_note(f"in batch {name}")
            raise
        if batch % BATCHES_TOLD == first:
            _tell(f"codec: {figures.frames} frames of part {first}, longest {figures.longest_s:.3f} s")
    return figures


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _codec(seed: str, frames: int) -> None:
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with context.Pool(PROCESSES) as pool:
        parts = pool.starmap(codec_batches, [(seed, number, frames, PROCESSES) for number in range(PROCESSES)])
    for part in parts:
        assert part.rss_growth < CODEC_GROWTH, part
        print(json.dumps({"codec": asdict(part), "seconds": round(time.monotonic() - started)}), flush=True)


def _server(seed: str, frames: int) -> None:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory, Siege(Path(directory), everything(), seed) as siege:
        siege.attack(frames, FRAMES_TOLD)
        siege.assert_sound(SERVER_GROWTH)
        print(json.dumps({"server": asdict(siege.figures), "seconds": round(time.monotonic() - started)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", type=int, default=10_000_000, help="frames into the codec")
    parser.add_argument("--server", type=int, default=1_000_000, help="frames into a running server")
    parser.add_argument("--seed", default=secrets.token_hex(4))
    arguments = parser.parse_args()
    _tell(f"seed {arguments.seed}")
    if arguments.codec:
        _codec(arguments.seed, arguments.codec)
    if arguments.server:
        _server(arguments.seed, arguments.server)


if __name__ == "__main__":
    main()
