"""Only `broker/reading` knows the storage tiers. Other modules ask it and get a result or an awaitable."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
BROKER = ROOT / "broker"
READING = BROKER / "reading"
# It creates the reader of the archive and passes it to `broker/reading`.
ATTACHES = {Path("broker/archiving/attach.py")}
# Attributes that tell which tier has a message, or that read one tier alone.
TIERS = {"is_hot", "is_local", "get_hot", "get_cold", "old_reads", "hot", "cold", "hot_bytes"}
TIERS |= {"tiered_storage_level", "newest_segment_base"}
# Streams the local log: a slave may request only its newest file.
STREAMS = Path("broker/ha/master_session.py")
# Methods that read only the local log.
LOCAL_READS = {"get", "entry", "min_offset", "store_time", "offset_by_time", "query", "record_at"}
LOCAL_READS |= {"shows", "shown_record_at"}
STORE_OR_PART = re.compile(r"(^|[._])store(\.\w+)?$")
# Modules that read records which stay in the local log while they are needed: of internal topics, and the queues.
OWN_TOPICS = {
    Path("broker/pop/pop_book.py"): {"get", "min_offset"},
    Path("broker/requests/admin_inspect.py"): {"entry", "min_offset"},
    Path("broker/requests/end_transaction.py"): {"record_at"},
}


def modules(*rooms: Path) -> Iterator[tuple[Path, ast.Module]]:
    for room in rooms:
        for path in sorted(room.rglob("*.py")):
            if not path.is_relative_to(READING):
                yield path.relative_to(ROOT), ast.parse(path.read_text("utf-8"))


def test_only_reading_asks_which_tier_has_a_message() -> None:
    asked = [
        f"{path}:{node.lineno} {node.attr}"
        for path, tree in modules(BROKER)
        if path != STREAMS
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in TIERS
    ]
    assert asked == []


def test_only_reading_reads_the_archive() -> None:
    imports = {
        path
        for path, tree in modules(BROKER)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tiered.read")
    }
    assert imports == ATTACHES


def test_requests_read_messages_only_by_the_tiered_store() -> None:
    """A read of the local store would miss archived messages."""
    reads: dict[Path, set[str]] = {}
    for path, tree in modules(BROKER / "requests", BROKER / "pop"):
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(attr=verb, value=read)) if verb in LOCAL_READS:
                    if STORE_OR_PART.search(ast.unparse(read)):
                        reads.setdefault(path, set()).add(verb)
    assert reads == OWN_TOPICS
