"""A master's image of offsets is installed whole, once the slave's own log is confirmed as far, and never merged."""

from __future__ import annotations

import random

import msgspec
import pytest

from broker.metadata.images import OffsetsImage, Polled, decode_image, decode_offsets_image
from broker.tables.changes import UnreadableChange


def image(log_end: int, offset: int = 0) -> OffsetsImage:
    return OffsetsImage(log_end=log_end, position=0, offsets={"t@g": {0: offset}}, resets={})


def test_image_waits_until_the_own_log_is_confirmed_to_the_masters_end() -> None:
    polled = Polled[OffsetsImage]()
    assert polled.install_when(1 << 60) is None
    polled.offer(image(100))
    assert polled.install_when(99) is None
    assert polled.install_when(100) == image(100)
    assert polled.install_when(100) is None, "once"


def test_newest_installable_image_wins_even_with_lower_offsets() -> None:
    polled = Polled[OffsetsImage]()
    polled.offer(image(100, offset=7))
    polled.offer(image(100, offset=3))
    assert polled.install_when(100) == image(100, offset=3), "the group was set back"


def test_log_that_always_lags_still_installs_images() -> None:
    polled = Polled[OffsetsImage]()
    installed = []
    for confirm in range(0, 1000, 10):
        polled.offer(image(confirm + 25))
        if (ready := polled.install_when(confirm)) is not None:
            installed.append((confirm, ready.log_end))
    assert len(installed) > 10
    assert all(log_end <= confirm for confirm, log_end in installed)
    assert installed == sorted(installed, key=lambda pair: pair[1])


def test_installed_images_are_confirmed_and_never_older_than_before() -> None:
    dice = random.Random(5)
    for _ in range(200):
        polled, end, confirm, last = Polled[OffsetsImage](), 0, 0, -1
        for _ in range(60):
            end += dice.randrange(20)
            confirm = min(confirm + dice.randrange(25), end)
            if dice.random() < 0.6:
                polled.offer(image(end))
            ready = polled.install_when(confirm)
            if ready is not None:
                assert last <= ready.log_end <= confirm
                last = ready.log_end
        offered = end
        polled.offer(image(offered))
        while polled.install_when(end) is not None:
            last = offered
        assert last == offered, "at rest the last answer holds"


def test_images_of_the_former_master_are_dropped() -> None:
    polled = Polled[OffsetsImage]()
    polled.offer(image(1))
    polled.offer(image(2))
    polled.forget()
    assert polled.install_when(10) is None


def test_image_of_another_format_is_refused() -> None:
    data = msgspec.json.encode(image(5))
    assert decode_offsets_image(data) == image(5)
    with pytest.raises(UnreadableChange, match="format 2"):
        decode_offsets_image(data.replace(b'"v":1', b'"v":2'))
    for damaged in (b"", b"{}", b'{"v":1}', data[:-1], data.replace(b'"t@g":{"0":0}', b'"t@g":{"x":0}')):
        with pytest.raises(UnreadableChange, match="damaged"):
            decode_offsets_image(damaged)
    with pytest.raises(UnreadableChange, match="damaged"):
        decode_image(data)
