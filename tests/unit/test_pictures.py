"""Each committed picture was drawn from its present source, and needs no network to be viewed."""

from __future__ import annotations

import re

from tests.pictures import PICTURES, ROOT, SOURCES, mark_of


def test_each_picture_has_one_source() -> None:
    sources = {source.stem for source in SOURCES.glob("*.d2")}
    assert sources == {picture.stem for picture in PICTURES.glob("*.svg")}
    assert "architecture" in sources


def test_pictures_are_drawn_from_their_present_sources() -> None:
    outdated = [
        source.name
        for source in SOURCES.glob("*.d2")
        if not (PICTURES / f"{source.stem}.svg").read_text("utf-8").endswith(mark_of(source.read_bytes()))
    ]
    assert outdated == [], "run `make pictures`"


def test_pictures_load_nothing_from_a_network() -> None:
    for picture in PICTURES.glob("*.svg"):
        loaded = re.findall(r"""(?:href=|src=|url\()["']?(https?:[^"')]+)""", picture.read_text("utf-8"))
        assert loaded == [], picture.name


def test_each_picture_is_shown_by_a_page() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {name for page in pages for name in re.findall(r"assets/([\w-]+)\.svg", page.read_text("utf-8"))}
    assert {picture.stem for picture in PICTURES.glob("*.svg")} <= shown
