"""Damaged frames of real traffic: the codec raises only documented errors, and servers survive and lose no message."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fuzz import codec_target, corpus
from tests.fuzz.mutate import Mutator, seeds_of
from tests.fuzz.run import MIB, codec_batches, everything
from tests.fuzz.server_target import Siege

SEED = os.environ.get("NEVE_FUZZ_SEED", "neve")
CODEC_FRAMES = int(os.environ.get("NEVE_FUZZ_CODEC", "100000"))
SERVER_FRAMES = int(os.environ.get("NEVE_FUZZ_SERVER", "10000"))


def test_corpus_has_both_dialects_and_all_common_requests() -> None:
    seeds = seeds_of(corpus.load(), corpus.Direction.CLIENT_TO_BROKER)
    for dialect in (0, 1):
        codes = {seed.command.code for seed in seeds if seed.command.serialize_type == dialect}
        assert codes >= {310, 320, 11, 34, 36, 37, 41, 15, 400, 200050, 200051, 200053, 17, 215, 28, 12}
    assert corpus.FILE.stat().st_size < MIB


def test_same_seed_gives_the_same_frames() -> None:
    seeds = seeds_of(corpus.load())
    one, other = Mutator("a", seeds), Mutator("a", seeds)
    assert [one.cut(one.frame()) for _ in range(500)] == [other.cut(other.frame()) for _ in range(500)]


def test_fuzzer_finds_a_crash_in_the_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise IndexError

    monkeypatch.setattr(codec_target, "decode_batch", broken)
    with pytest.raises(IndexError) as found:
        codec_batches(SEED, 0, 1000)
    assert any("the stream was" in note for note in found.value.__notes__)


def test_codec_raises_only_documented_errors() -> None:
    figures = codec_batches(SEED, 0, CODEC_FRAMES)
    assert figures.frames == CODEC_FRAMES
    assert figures.decoded > CODEC_FRAMES // 2
    assert figures.rss_growth < 64 * MIB


def test_servers_survive_damaged_frames_and_keep_acknowledged_messages(tmp_path: Path) -> None:
    with Siege(tmp_path, everything(), SEED) as siege:
        siege.attack(SERVER_FRAMES)
        siege.assert_sound(128 * MIB)
        assert siege.figures.frames >= SERVER_FRAMES
        assert siege.figures.answers.get(0, 0) > SERVER_FRAMES // 20
