"""Object keys of the archive.

    <prefix>/topic=<T>/dt=<YYYY-MM-DD>/broker=<B>/<start>-<end>-e<epoch>[.<n>].parquet   data
    <prefix>/_neve/<B>/journal/<seq:020d>.msgpack                                  journal
    <prefix>/_neve/<B>/checkpoint/<seq:020d>.catalog                               checkpoint
    <prefix>/_neve/<B>/checkpoint/<seq:020d>-<n>.pack                              its topics
    <prefix>/_neve/<B>/state/<slot>.msgpack                                        state slots
    <prefix>/_neve/format.msgpack                                                  format

`<T>` and `<B>` encode every byte outside [A-Za-z0-9_.-] as %XX: Hive readers decode it, and no name can leave its
component. `_neve` begins with an underscore because Hadoop readers skip such directories.

A topic whose component would exceed MAX_COMPONENT is truncated, never within a %XX, and `~` and the SHA-256 (64 hex
digits) of the whole name are appended. No other component contains a `~`. The journal and the object's metadata
contain the whole name.

`.<n>` (n >= 1) marks an object that a rewrite made from others over the same range.
"""

import hashlib
import re
from typing import NamedTuple

MAX_COMPONENT = 255

_CUT = "~"
_HASH_LENGTH = 64
_HALF_ESCAPED = re.compile(r"%[0-9A-F]?$")
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
_ESCAPED = re.compile(r"%([0-9A-Fa-f]{2})")
_FILE = r"(?P<start>\d{20})-(?P<end>\d{20})-e(?P<epoch>\d+)(?:\.(?P<rewrite>[1-9]\d*))?\.parquet"
_DATA_FILE = re.compile(_FILE)
_DATA_KEY = re.compile(
    r"(?:(?P<prefix>.+)/)?topic=(?P<topic>[^/]+)/dt=(?P<day>\d{4}-\d{2}-\d{2})/broker=(?P<broker>[^/]+)/" + _FILE
)

_JOURNAL_FILE = re.compile(r"(?P<seq>\d{20})\.msgpack")
_CHECKPOINT_FILE = re.compile(r"(?P<seq>\d{20})(?:\.catalog|-(?P<pack>\d+)\.pack)")


class NameTooLong(ValueError):
    """A broker name whose path component would exceed the limit of object stores and file systems."""


class DataKey(NamedTuple):
    """The parts of a data object's key."""

    prefix: str
    topic: str | None  # None if the key contains a truncated name
    day: str
    broker: str
    start: int
    end: int
    epoch: int
    rewrite: int = 0  # 0 for an object of an offload round


def escape(name: str) -> str:
    """Encode a name as one path component."""
    escaped = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in _raw(name))
    # "." and ".." would leave the archive in a directory store.
    return escaped.replace(".", "%2E") if escaped in {".", ".."} else escaped


def unescape(component: str) -> str:
    """Decode a path component that `escape` made."""
    raw = bytearray()
    position = 0
    for match in _ESCAPED.finditer(component):
        raw += component[position : match.start()].encode()
        raw.append(int(match.group(1), 16))
        position = match.end()
    raw += component[position:].encode()
    return raw.decode("utf-8", "surrogateescape")


def topic_component(topic: str) -> str:
    """Return `topic=…` for a data key; a name that is too long is truncated and identified by a hash."""
    component = f"topic={escape(topic)}"
    if len(component) <= MAX_COMPONENT:
        return component
    kept = _HALF_ESCAPED.sub("", component[: MAX_COMPONENT - len(_CUT) - _HASH_LENGTH])
    return f"{kept}{_CUT}{hashlib.sha256(_raw(topic)).hexdigest()}"


def fits_key(topic: str) -> bool:
    """Return whether the topic's component contains its whole name."""
    return _CUT not in topic_component(topic)


def broker_component(broker: str) -> str:
    """Return `broker=…` for a data key. Raises NameTooLong."""
    return _bounded(f"broker={escape(broker)}")


def data_key(
    prefix: str, topic: str, day: str, broker: str, *, start: int, end: int, epoch: int, rewrite: int = 0
) -> str:
    """Return the key of a data object: CommitLog offsets [start, end) of a topic and day, written under an epoch."""
    name = f"{start:020d}-{end:020d}-e{epoch}{f'.{rewrite}' if rewrite else ''}.parquet"
    return _join(prefix, topic_component(topic), f"dt={day}", broker_component(broker), name)


def parse_data_key(key: str) -> DataKey | None:
    """Return the parts of a data key; None for any other key."""
    match = _DATA_KEY.fullmatch(key)
    if match is None:
        return None
    return DataKey(
        match["prefix"] or "",
        unescape(match["topic"]) if _CUT not in match["topic"] else None,
        match["day"],
        unescape(match["broker"]),
        int(match["start"]),
        int(match["end"]),
        int(match["epoch"]),
        int(match["rewrite"] or 0),
    )


def parse_start(file: str) -> int | None:
    """Return the start in the last component of a data key; None for any other key."""
    match = _DATA_FILE.fullmatch(file)
    return None if match is None else int(match["start"])


def brokers_prefix(prefix: str) -> str:
    """Return the prefix whose listing with a delimiter shows the brokers with an archive."""
    return _join(prefix, "_neve") + "/"


def broker_of(prefix: str, listed: str) -> str:
    """Return the broker of an entry of that listing."""
    return unescape(listed.removeprefix(brokers_prefix(prefix)).strip("/"))


def journal_key(prefix: str, broker: str, seq: int) -> str:
    """Return the key of journal entry `seq`."""
    return _join(prefix, "_neve", _journal_of(broker), "journal", f"{seq:020d}.msgpack")


def journals_prefix(prefix: str, broker: str) -> str:
    """Return the prefix whose listing shows the entries of a broker's journal."""
    return _join(prefix, "_neve", _journal_of(broker), "journal") + "/"


def parse_journal_key(key: str) -> int | None:
    """Return the number of an entry; None for any other key."""
    match = _JOURNAL_FILE.fullmatch(key.rpartition("/")[2])
    return None if match is None else int(match["seq"])


def checkpoint_key(prefix: str, broker: str, seq: int) -> str:
    """Return the key of the checkpoint after entry `seq`."""
    return _join(prefix, "_neve", _journal_of(broker), "checkpoint", f"{seq:020d}.catalog")


def pack_key(prefix: str, broker: str, seq: int, number: int) -> str:
    """Return the key of pack `number` of the checkpoint after entry `seq`."""
    return _join(prefix, "_neve", _journal_of(broker), "checkpoint", pack_file(seq, number))


def pack_file(seq: int, number: int) -> str:
    """Return the last component of a pack's key."""
    return f"{seq:020d}-{number}.pack"


def checkpoints_prefix(prefix: str, broker: str) -> str:
    """Return the prefix whose listing shows a broker's checkpoints and packs."""
    return _join(prefix, "_neve", _journal_of(broker), "checkpoint") + "/"


def parse_checkpoint_key(key: str) -> tuple[int, int | None] | None:
    """Return (seq, number of the pack or None for the checkpoint itself); None for any other key."""
    match = _CHECKPOINT_FILE.fullmatch(key.rpartition("/")[2])
    if match is None:
        return None
    return int(match["seq"]), None if match["pack"] is None else int(match["pack"])


def state_key(prefix: str, broker: str, slot: int) -> str:
    """Return the key of a state slot."""
    return _join(prefix, "_neve", _journal_of(broker), "state", f"{slot}.msgpack")


def format_key(prefix: str) -> str:
    """Return the key of the object with the format version of a prefix."""
    return _join(prefix, "_neve", "format.msgpack")


def _journal_of(broker: str) -> str:
    """Return the component of a broker; a name that would not fit a data key is rejected here as well."""
    return broker_component(broker).removeprefix("broker=")


def _raw(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _join(prefix: str, *parts: str) -> str:
    cleaned = prefix.strip("/")
    return "/".join([cleaned, *parts] if cleaned else parts)


def _bounded(component: str) -> str:
    if len(component) > MAX_COMPONENT:
        raise NameTooLong(
            f"brokerName: the path component {component[:40]}… has {len(component)} bytes, the limit is {MAX_COMPONENT}"
        )
    return component
