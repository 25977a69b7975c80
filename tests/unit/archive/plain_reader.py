"""An archive in a directory, read by the page docs/archive-format.md alone: msgpack, PyArrow, the standard library.

    python -I plain_reader.py DIRECTORY [--journal]     what readers see, as JSON, and which modules that took

It is run as a program of its own and imports nothing of the house: what it can't do, the page does not say.
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
    """The catalog of one broker: the newest checkpoint that can be read, and the entries from there on."""

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
        self.end = self._find_end()
        self.checkpoint = self._newest_checkpoint()
        self.applied = 0
        for seq in range(self.checkpoint + 1, self.end):
            self._apply(self._entry(seq))
            self.applied += 1

    # ---- finding the end, and a checkpoint

    def _key(self, seq: int) -> Path:
        return self.own / "journal" / f"{seq:020d}.msgpack"

    def _entry(self, seq: int) -> dict[str, Any]:
        entry: dict[str, Any] = unpacked(self._key(seq).read_bytes())
        known = 2 if entry["type"] == "UNEXPIRE" or "kind" in entry else 1
        assert entry.get("kind", "compact") == "compact", f"entry {seq} is of kind {entry['kind']}"
        assert entry["version"] <= known, f"entry {seq} is of version {entry['version']}"
        return entry

    def _find_end(self) -> int:
        missing = 0
        while self._key(missing).exists():
            missing = 2 * missing + 1
        low = 0  # all below stand
        while low < missing:
            middle = (low + missing) // 2
            if self._key(middle).exists():
                low = middle + 1
            else:
                missing = middle
        return low

    def _newest_checkpoint(self) -> int:
        if not self.end:
            return NO_CHECKPOINT
        last = self._entry(self.end - 1)
        seq = last["through_seq"] if last["type"] == "CHECKPOINT" else last["checkpoint"]
        while seq != NO_CHECKPOINT:
            try:
                content = opened(self.own / "checkpoint" / f"{seq:020d}.catalog", "CATALOG")
            except (OSError, ValueError):
                seq = self._entry(seq)["checkpoint"]
                continue
            assert content["through_seq"] == seq
            self._begin_with(content)
            break
        return int(seq)

    def _begin_with(self, content: dict[str, Any]) -> None:
        self.epoch = content["epoch"]
        self.live = {one["key"]: one for one in content["names"]}
        self.expiring = {one["key"]: one for one, _ in content["expiring"]}
        self.minimums = {(topic, queue): minimum for topic, queue, minimum in content["queues"]}
        for entry in content["topics"]:
            self._topic(entry)
        for gap in content["gaps"]:
            self._gap(gap)
        self.open = {number: {one["key"] for one in names} for number, names in content["open"].items()}

    # ---- what the entries say

    def _apply(self, entry: dict[str, Any]) -> None:
        match entry["type"]:
            case "EPOCH":
                self.epoch = entry["epoch"]
            case "INTENT" | "ABORT" if "kind" in entry:
                pass  # nobody sees what a rewrite has under way
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

    # ---- what readers see

    def messages(self) -> list[dict[str, Any]]:
        """Rows of live objects that no minimum hides, in log order of the objects."""
        found = []
        for key, one in sorted(self.live.items(), key=lambda item: (item[1]["topic"], item[1]["start"], item[0])):
            found += [row for row in rows(self.root / key, one) if self._shows(one["topic"], row)]
        return found

    def _shows(self, topic: str, row: dict[str, Any]) -> bool:
        return bool(row["queue_offset"] >= self.minimums.get((topic, row["queue_id"]), 0))

    def state(self) -> dict[str, Any] | None:
        """The newest of the two slots that can be read."""
        slots = []
        for slot in (0, 1):
            try:
                slots.append(opened(self.own / "state" / f"{slot}.msgpack", "STATE"))
            except (OSError, ValueError):
                continue
        return max(slots, key=lambda slot: (slot["epoch"], slot["number"]), default=None)


def unpacked(data: bytes) -> Any:
    return msgpack.unpackb(data, strict_map_key=False)  # maps by queue have integers as their keys


def opened(path: Path, kind: str) -> Any:
    """The content of an envelope; ValueError where it is damaged."""
    envelope = unpacked(path.read_bytes())
    if envelope["kind"] != kind or envelope["codec"] != "zlib":
        raise ValueError(f"{path} is no {kind}")
    assert envelope["version"] == 1, f"{path} is of version {envelope['version']}"
    try:
        content = zlib.decompress(envelope["body"])
    except zlib.error as error:
        raise ValueError(f"{path}: {error}") from None
    if len(content) != envelope["size"] or hashlib.sha256(content).hexdigest() != envelope["sha256"]:
        raise ValueError(f"{path}: not what was written")
    return unpacked(content)


def rows(path: Path, said: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of one object, held against what the journal and the file itself say of it."""
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
    """Everything, by broker; without `objects` only what the journals say."""
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
