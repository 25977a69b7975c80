from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from infra.disk.versioned_file import VersionedFile
from tests.kit.store.sim_disk import SimDisk

ROOT = Path("/data")


class _Document(msgspec.Struct):
    count: int
    version: int = 1


class _Damaged(Exception):
    pass


def _file(disk: SimDisk, *, indent: bool = False) -> VersionedFile[_Document]:
    return VersionedFile(disk, ROOT / "state.json", _Document, _Damaged, indent=indent)


def _disk(content: bytes | None = None) -> SimDisk:
    disk = SimDisk()
    disk.make_dirs(ROOT)
    if content is not None:
        disk.write_atomic(ROOT / "state.json", content)
    return disk


def test_missing_file_reads_as_none() -> None:
    assert _file(_disk()).read() is None


@pytest.mark.parametrize("indent", [False, True])
def test_written_document_survives_a_power_cut(indent: bool) -> None:
    disk = _disk()
    _file(disk, indent=indent).write(_Document(7))
    assert _file(disk.power_cut()).read() == _Document(7)


def test_removed_file_stays_removed_after_a_power_cut() -> None:
    disk = _disk(b'{"count":7}')
    _file(disk).remove()
    assert not _file(disk.power_cut()).exists


@pytest.mark.parametrize(
    "content", [b"", b"\x00\x00", b'{"count":"7"}', b"[]", b'{"count":"\xff"}', b'{"version":"2"}']
)
def test_unreadable_content_is_an_error_that_names_the_file(content: bytes) -> None:
    with pytest.raises(_Damaged, match=r"/data/state\.json cannot be read: "):
        _file(_disk(content)).read()


@pytest.mark.parametrize("name", ["version", "neveFormat"])
def test_newer_format_is_refused_for_any_content(name: str) -> None:
    """The error names the format, even if the newer document has other fields."""
    with pytest.raises(_Damaged, match="has format 2, this release reads formats up to 1"):
        _file(_disk(b'{"%b":2,"total":[]}' % name.encode())).read()


def test_a_file_without_a_format_number_is_read() -> None:
    assert _file(_disk(b'{"count":7}')).read() == _Document(7)
