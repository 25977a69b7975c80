"""Reader of an archive in a directory, written from docs/reference/archive-format.md with msgpack and PyArrow only.

    python -I plain_reader.py DIRECTORY [--journal]     print the visible rows as JSON, and the imported modules

It runs as a separate program and imports no neve module, so it proves that the page is sufficient.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgpack
import pyarrow.parquet as pq

NO_CHECKPOINT = -1


class Journal:
    """The catalog of one broker: the newest readable checkpoint, and the entries after it."""

    def __init__(self, root: Path, directory: str) -> None:
        self.root = root
        self.own = root / "_neve" / directory
        self.live: dict[str, dict[str, Any]] = {}
        self.expiring: dict[str, dict[str, Any]] = {}
        self.minimums: dict[tuple[str, int], int] = {}
        self.gaps: list[tuple[str, int, int, int]] = []
        self.tombstones: dict[str, dict[int, int]] = {}
        self.open: dict[int, set[str]] = {}
        self.epoch = 0
        self.before = b""
        self.checkpoint = self._newest_checkpoint()
        self.end = self.checkpoint + 1
        self.applied = 0
        entries = []
        while self._key(self.end).exists():
            entries.append(self._entry(self.end))
            self.end += 1
        if self.checkpoint != NO_CHECKPOINT:
            stands = self._key(self.checkpoint).read_bytes()[:256]
            assert stands == self.before, "what was read was deleted meanwhile: read it again"
        for entry in entries:
            self._apply(entry)
            self.applied += 1

    # ---- finding a checkpoint

    def _key(self, seq: int) -> Path:
        return self.own / "journal" / f"{seq:020d}.msgpack"

    def _entry(self, seq: int) -> dict[str, Any]:
        entry: dict[str, Any] = unpacked(self._key(seq).read_bytes())
        assert entry.get("kind", "") in {"", "compact", "erase"}, f"entry {seq} is of kind {entry['kind']}"
        assert entry["version"] <= 1, f"entry {seq} is of version {entry['version']}"
        return entry

    def _newest_checkpoint(self) -> int:
        for path in sorted((self.own / "checkpoint").glob("*.catalog"), reverse=True):
            try:
                content = opened(path, "CATALOG")
                parts = [self._parts(content, row) for row in content["topics"]]
            except (OSError, ValueError):
                continue
            seq = int(path.stem)
            assert content["through_seq"] == seq
            self._begin_with_parts(content, parts)
            self.before = content["entry"]
            return seq
        return NO_CHECKPOINT

    def _parts(self, head: dict[str, Any], row: list[Any]) -> list[dict[str, Any]]:
        """Return the parts of a topic: its head and its runs of blocks. Raises ValueError if one is damaged."""
        found = []
        for pack, offset, length, digest in row[4]:
            seq, number, size = head["packs"][pack]
            data = (self.own / "checkpoint" / f"{seq:020d}-{number}.pack").read_bytes()
            part = data[offset : offset + length]
            if len(data) != size or hashlib.sha256(part).digest()[:16] != digest:
                raise ValueError(f"a part of {row[0]} is damaged")
            found.append(unpacked(part))
            assert found[-1]["topic"] == row[0]
        return found

    def _begin_with_parts(self, head: dict[str, Any], topics: list[list[dict[str, Any]]]) -> None:
        self.epoch = head["epoch"]
        self.open = {number: {one["key"] for one in names} for number, names in head["open"].items()}
        for (own, *runs), (topic, objects, gaps, _, _) in zip(topics, head["topics"], strict=True):
            live = [one for part in (*runs, own) for block in part["blocks"] for one in names_in(topic, block)]
            assert (len(live), len(own.get("gaps", []))) == (objects, gaps)
            assert [one["start"] for one in live] == sorted(one["start"] for one in live)
            self.live |= {one["key"]: one for one in live}
            for _, block in own.get("expiring", []):
                self.expiring |= {one["key"]: one for one in names_in(topic, block)}
            self.minimums |= {(topic, queue): minimum for queue, minimum, _ in own.get("queues", [])}
            if "entry" in own:
                self._topic(own["entry"])
            for gap in own.get("gaps", []):
                self._gap(gap)

    # ---- journal entries

    def _apply(self, entry: dict[str, Any]) -> None:
        match entry["type"]:
            case "EPOCH":
                self.epoch = entry["epoch"]
            case "INTENT" | "ABORT" if entry["kind"]:
                pass  # objects of an open rewrite are invisible
            case "INTENT":
                self.open[entry["round"]] = {one["key"] for one in entry["names"]}
            case "COMMIT":
                self.live |= {one["key"]: one for one in entry["names"]}
                self._close(entry["round"], {one["key"] for one in entry["names"]})
            case "ABORT":
                self._close(entry["round"], set(entry["keys"]) or set(self.open.get(entry["round"], ())))
            case "GAP":
                self._gap(entry)
            case "EXPIRE":
                self._expire(entry["keys"], entry["minimums"])
            case "UNEXPIRE":
                self._unexpire(entry)
            case "DELETED":
                for key in entry["keys"]:
                    self.expiring.pop(key, None)
            case "TOPIC":
                self._topic(entry)
            case "REPLACE":
                self._withdraw(entry["old"])
                self.live |= {one["key"]: one for one in entry["new"]}
            case "ERASE":
                self._withdraw(entry["old"])
                self.live |= {one["key"]: one for one in entry["new"]}
                told = {(topic, queue, at) for topic, queue, first, last in self.gaps for at in range(first, last + 1)}
                rows = [row for row in entry["rows"] if (row[0], row[1], row[2]) not in told]
                self.gaps += [tuple(row) for row in rows]
            case "FORGET":
                for topic in entry["topics"]:
                    self._forget(topic)

    def _forget(self, topic: str) -> None:
        self.tombstones.pop(topic, None)
        self.minimums = {place: minimum for place, minimum in self.minimums.items() if place[0] != topic}
        self.gaps = [gap for gap in self.gaps if gap[0] != topic]

    def _close(self, number: int, keys: set[str]) -> None:
        left = self.open.pop(number, set()) - keys
        if left:
            self.open[number] = left

    def _gap(self, entry: dict[str, Any]) -> None:
        self.gaps.append((entry["topic"], entry["queue"], entry["first"], entry["last"]))
        self.gaps += [tuple(one) for one in entry["more"]]

    def _withdraw(self, keys: list[str]) -> list[dict[str, Any]]:
        gone = [self.live.pop(key) for key in keys if key in self.live]
        self.expiring |= {one["key"]: one for one in gone}
        return gone

    def _expire(self, keys: list[str], minimums: dict[str, dict[int, int]]) -> None:
        for one in self._withdraw(keys):
            for queue, (_, last, _) in one["queues"].items():
                if not any(one["topic"] == other["topic"] and queue in other["queues"] for other in self.live.values()):
                    self._raise(one["topic"], {queue: last + 1})
        for topic, of_queues in minimums.items():
            self._raise(topic, of_queues)

    def _unexpire(self, entry: dict[str, Any]) -> None:
        self.live |= {key: self.expiring.pop(key) for key in entry["keys"] if key in self.expiring}
        for topic, of_queues in entry["minimums"].items():
            for queue, minimum in of_queues.items():
                self.minimums[topic, queue] = max(minimum, self.tombstones.get(topic, {}).get(queue, 0))

    def _topic(self, entry: dict[str, Any]) -> None:
        self.tombstones[entry["topic"]] = entry["minimums"]
        self._raise(entry["topic"], entry["minimums"])

    def _raise(self, topic: str, minimums: dict[int, int]) -> None:
        for queue, minimum in minimums.items():
            self.minimums[topic, queue] = max(self.minimums.get((topic, queue), 0), minimum)

    # ---- visible rows

    def messages(self) -> list[dict[str, Any]]:
        """Return the rows of live objects that no minimum hides, in log order of the objects."""
        found = []
        for key, one in sorted(self.live.items(), key=lambda item: (item[1]["topic"], item[1]["start"], item[0])):
            found += [row for row in rows(self.root / key, one) if self._shows(one["topic"], row)]
        return found

    def _shows(self, topic: str, row: dict[str, Any]) -> bool:
        return bool(row["queue_offset"] >= self.minimums.get((topic, row["queue_id"]), 0))

    def state(self) -> dict[str, Any] | None:
        """Return the newest readable state slot."""
        slots = []
        for slot in (0, 1):
            try:
                slots.append(opened(self.own / "state" / f"{slot}.msgpack", "STATE"))
            except (OSError, ValueError):
                continue
        return max(slots, key=lambda slot: (slot["epoch"], slot["number"]), default=None)


def unpacked(data: bytes) -> Any:
    return msgpack.unpackb(data, strict_map_key=False)  # maps by queue have integer keys


def opened(path: Path, kind: str) -> Any:
    """Return the content of an envelope. Raises ValueError if it is damaged."""
    envelope = unpacked(path.read_bytes())
    if envelope["kind"] != kind or envelope["codec"] != "zlib":
        raise ValueError(f"{path} is no {kind}")
    assert envelope["version"] <= 1, f"{path} is of version {envelope['version']}"
    try:
        content = zlib.decompress(envelope["body"])
    except zlib.error as error:
        raise ValueError(f"{path}: {error}") from None
    if len(content) != envelope["size"] or hashlib.sha256(content).hexdigest() != envelope["sha256"]:
        raise ValueError(f"{path}: not what was written")
    return unpacked(content)


def names_in(topic: str, block: list[Any]) -> list[dict[str, Any]]:
    """Return the names of a block in the form of a COMMIT entry."""
    head, tail, count, codec, packed = *block[:3], *block[13:]
    assert codec in {"", "zlib"}, codec
    records = msgpack.Unpacker(strict_map_key=False)
    records.feed(zlib.decompress(packed) if codec else packed)
    found = [name_of(topic, head, tail, record) for record in records]
    assert len(found) == count
    return found


def name_of(topic: str, head: str, tail: str, record: list[Any]) -> dict[str, Any]:
    suffix, key, day, start, length, size, footer, etag, checksum, sha256 = record[:10]
    rows, wire_bytes, low, span, queues, groups = record[10:]
    end = start + length
    name = {
        "key": key or f"{head}/dt={day}/{tail}/{start:020d}-{end:020d}-{suffix}.parquet",
        "topic": topic, "day": day, "start": start, "end": end, "size": size, "footer": footer, "etag": hexed(etag),
        "checksum": [checksum[0], hexed(checksum[1])], "sha256": hexed(sha256), "rows": rows, "wire_bytes": wire_bytes,
        "min_time": low, "max_time": low + span, "row_groups": [],
    }  # fmt: skip
    row = place = 0
    following: dict[int, int] = {}
    lies: dict[int, list[int]] = {}
    for first_row, count, offset, long, newest, oldest, wire, flat in groups:
        row, place = row + first_row, place + offset
        runs, at = [], row
        for queue, above, more in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            first = following.get(queue, 0) + above
            runs.append([queue, first, first + more])
            following[queue] = first + more + 1
            lies[queue] = [lies.get(queue, [first])[0], first + more, lies.get(queue, [0, 0, at])[2]]
            at += more + 1
        name["row_groups"].append(
            {
                "first_row": row, "rows": count, "offset": place, "length": long, "newest_ms": low + newest,
                "oldest_ms": low + oldest, "wire_bytes": wire, "runs": runs,
            }
        )  # fmt: skip
        row, place = row + count, place + long
    name["queues"] = lies if queues is None else queues
    return name


def hexed(said: str | bytes) -> str:
    return said.hex() if isinstance(said, bytes) else said


def rows(path: Path, said: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of one object, checked against the journal and the file metadata."""
    data = path.read_bytes()
    algorithm, digest = said["checksum"]
    assert (len(data), algorithm, f"{zlib.crc32(data):08x}") == (said["size"], "crc32", digest), path
    assert int.from_bytes(data[-8:-4], "little") + 8 == said["footer"], path
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        metadata = {name.decode(): value.decode() for name, value in file.metadata.metadata.items()}
        assert metadata["neve.format_version"] == "1", path
        assert (metadata["neve.topic"], metadata["neve.sha256"]) == (said["topic"], said["sha256"]), path
        assert (int(metadata["neve.start"]), int(metadata["neve.end"])) == (said["start"], said["end"]), path
        described = [
            (group["wire_bytes"], group["oldest_ms"], group["newest_ms"], group["runs"]) for group in said["row_groups"]
        ]
        assert json.loads(metadata["neve.groups"]) == [list(one) for one in described], path
        found = file.read().to_pylist()
    assert len(found) == said["rows"], path
    spans = [
        (queue, offset)
        for group in said["row_groups"]
        for queue, first, last in group["runs"]
        for offset in range(first, last + 1)
    ]
    assert [(row["queue_id"], row["queue_offset"]) for row in found] == spans, path
    return [{"topic": said["topic"], **row} for row in found]


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)  # timestamps


def read(root: Path, *, objects: bool) -> dict[str, Any]:
    """Return everything by broker; without `objects`, only the content of the journals."""
    store_format = unpacked((root / "_neve" / "format.msgpack").read_bytes())
    assert store_format["version"] == 1, store_format
    brokers = {}
    for path in sorted((root / "_neve").iterdir()):
        if not path.is_dir():
            continue
        journal = Journal(root, path.name)
        brokers[unquote(path.name)] = {
            "epoch": journal.epoch,
            "end": journal.end,
            "checkpoint": journal.checkpoint,
            "applied": journal.applied,
            "live": sorted(journal.live),
            "expiring": sorted(journal.expiring),
            "open": sorted([number, sorted(keys)] for number, keys in journal.open.items()),
            "gaps": sorted(journal.gaps),
            "minimums": sorted([*place, minimum] for place, minimum in journal.minimums.items() if minimum),
            "tombstones": {
                topic: sorted(minimums.items()) for topic, minimums in journal.tombstones.items() if minimums
            },
            "messages": journal.messages() if objects else [],
            "state": journal.state(),
        }
    return {"cluster": store_format["cluster"], "brokers": brokers}


if __name__ == "__main__":
    found = read(Path(sys.argv[1]), objects="--journal" not in sys.argv)
    found["modules"] = sorted({name.partition(".")[0] for name in sys.modules})
    json.dump(found, sys.stdout, default=_as_json)
