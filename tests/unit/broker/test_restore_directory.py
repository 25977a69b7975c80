"""Data directories that a restore may fill."""

from pathlib import Path

import pytest

from broker.archiving.restore import refuse_occupied
from broker.config import BrokerConfig
from infra.disk.filesystem import RealDisk
from infra.process.startup import EXIT_ARCHIVE, StartupError


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b"\xff"])
def test_unreadable_table_is_named_and_nothing_is_restored(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "topics.json").write_bytes(damaged)
    with pytest.raises(StartupError, match=r"config/topics\.json can't be read") as refused:
        refuse_occupied(BrokerConfig(store_path_root_dir=str(tmp_path)), RealDisk())
    assert refused.value.exit_code == EXIT_ARCHIVE


def test_files_of_a_refused_start_do_not_prevent_a_restore(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "topics.json").write_text('{"topicConfigTable": {"TBW102": {}, "broker-a": {}}}')
    refuse_occupied(BrokerConfig(store_path_root_dir=str(tmp_path)), RealDisk())
