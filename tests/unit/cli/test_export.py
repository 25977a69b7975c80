"""Tests of exports and imports: resuming after a kill, and translation of consumer offsets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neve.cli.export_files import Export, GroupOffset, Last, joined, lines_from, message_file, truncate_to_whole_lines
from neve.cli.failures import Failure
from neve.cli.importing import MessageRun, QueueImport, next_ids, together
from neve.client import MessageQueue

QUEUE = MessageQueue("%DLQ%a|b", "broker/a b", 3)


def test_offsets_are_translated_by_the_imported_messages() -> None:
    progress = QueueImport(MessageQueue("t", "b", 0), 50)
    assert progress.translated(7) == 50
    # exported from 10 on; 13 does not exist; another producer also sent to the target
    for source, target in ((10, 50), (11, 51), (12, 52), (14, 60), (15, 61)):
        progress.record(source, target, str(source))
    assert progress.runs == [MessageRun(10, 50, 3), MessageRun(14, 60, 2)]
    found = {offset: progress.translated(offset) for offset in (0, 10, 12, 13, 14, 15, 16, 99)}
    assert found == {0: 50, 10: 50, 12: 52, 13: 60, 14: 60, 15: 61, 16: 62, 99: 62}
    assert progress.unknown_from == 62
    again = QueueImport.of(json.loads(json.dumps(progress.row())))
    assert again.row() == progress.row()


@pytest.mark.parametrize("cut", [0, 1, 40, 41, 60])
def test_torn_file_is_truncated_to_its_last_whole_line(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "lines"
    lines = [
        json.dumps({"offset": number, "msg_id": f"id{number}", "body": "x" * number * 1000}).encode() + b"\n"
        for number in range(100)
    ]
    whole = b"".join(lines)
    file.write_bytes(whole + lines[-1][:cut] if cut < 41 else whole[: -len(lines[-1]) + cut])
    expected = 99 if cut < 41 else 98
    assert truncate_to_whole_lines(file) == Last(expected, f"id{expected}")
    assert file.read_bytes() == b"".join(lines[: expected + 1])
    assert [line for _, line in lines_from(file, len(lines[0]))] == lines[1 : expected + 1]


@pytest.mark.parametrize("hole", [(40, 60), (10, 11), (0, 5), (95, 120)])
def test_hole_left_by_a_power_cut_is_truncated(tmp_path: Path, hole: tuple[int, int]) -> None:
    file = tmp_path / "b.0.jsonl"
    rows = [json.dumps({"offset": offset, "msg_id": f"ID{offset}", "body": "x"}) + "\n" for offset in range(5)]
    length = len(rows[0])
    data = bytearray("".join(rows).encode())
    begin, end = hole
    data[begin:end] = bytes(end - begin)
    file.write_bytes(data)
    whole = begin // length
    assert truncate_to_whole_lines(file) == (Last(whole - 1, f"ID{whole - 1}") if whole else None)
    assert file.read_bytes() == "".join(rows[:whole]).encode()


def test_file_without_a_whole_line_is_emptied(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    assert truncate_to_whole_lines(file) is None
    file.write_bytes(b'{"offset": 1')
    assert truncate_to_whole_lines(file) is None
    assert file.read_bytes() == b""
    file.write_bytes(b"no message\n")
    with pytest.raises(Failure):
        truncate_to_whole_lines(file)


def test_topic_and_broker_names_cannot_escape_the_directory(tmp_path: Path) -> None:
    file = message_file(tmp_path, QUEUE)
    assert file.parent.parent == tmp_path
    assert file != message_file(tmp_path, QUEUE._replace(queue_id=4))


def test_export_into_an_existing_directory_keeps_its_topics() -> None:
    one, two, gone = MessageQueue("one", "b", 0), MessageQueue("two", "b", 0), MessageQueue("two", "b", 1)
    earlier = Export(
        {"one": {"b": {"perm": 6}}, "two": {"b": {"perm": 6}}},
        (one, two, gone),
        {"g": {"v": 1}},
        (GroupOffset("g", one, 5), GroupOffset("g", two, 6), GroupOffset("g", gone, 7)),
    )
    now = Export({"two": {"b": {"perm": 4}}}, (two,), {"g": {"v": 2}}, (GroupOffset("g", two, 9),))
    assert joined(earlier, now) == Export(
        {"one": {"b": {"perm": 6}}, "two": {"b": {"perm": 4}}},
        (one, two, gone),
        {"g": {"v": 2}},
        (GroupOffset("g", one, 5), GroupOffset("g", gone, 7), GroupOffset("g", two, 9)),
    )


def test_import_bounds_its_buffered_lines_and_omits_none() -> None:
    long, short = [(at, bytes(1 << 20)) for at in range(5)], [(at, b"x") for at in range(5, 600)]
    lines = iter([*long, *short])
    batches = []
    while batch := together(lines):
        batches.append(batch)
    assert [line for batch in batches for line in batch] == [*long, *short]
    assert max(map(len, batches)) == 256
    assert max(sum(len(line) for _, line in batch) for batch in batches) <= 3 << 20


def test_import_looks_only_for_messages_since_the_last_note(tmp_path: Path) -> None:
    file = tmp_path / "b.0.jsonl"
    rows = [json.dumps({"offset": number, "msg_id": f"ID{number}", "body": "x"}) + "\n" for number in range(10_000)]
    file.write_text("".join(rows))
    position = len("".join(rows[:3000]).encode())
    found = next_ids("T", file, position)
    # 16 batches of 256 between two notes, and one in flight
    assert found == {f"ID{number}" for number in range(3000, 3000 + 17 * 256)}
