"""The certificate of an erasure, as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neve.cli.output import time_text


def certificate(told: Mapping[str, Any]) -> Iterator[str]:
    """Line by line; of a dry run what it found."""
    if told.get("event") != "certificate":
        yield f"{told.get('rows', 0)} messages in {told.get('objects', 0)} archived objects of {told.get('topic', '')}"
        return
    yield f"erasure       {told['id']}, {time_text(told['time_ms'])}"
    yield f"broker        {told['broker']}, its part alone"
    yield f"topic         {told['topic']}"
    yield f"key           SHA-256 of the id, a colon and the key: {told['key_sha256']}"
    yield f"erased        {told['rows']} messages" + ("" if told["complete"] else ", NOT ALL")
    for part in told["erased"]:
        offsets = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in part["offsets"])
        yield f"              {part['topic']} queue {part['queue']}: {offsets}"
    for file in told["quarantine"]:
        yield f"deleted       the quarantined record {file}"
    yield from _remains(told["remains"])


def _remains(remains: Mapping[str, Any]) -> Iterator[str]:
    for one in remains["objects"]:
        yield f"remains       until {time_text(one['until_ms'])} in the object {one['key']}"
    for key in remains["in_no_view"]:
        yield f"remains       in no view, until `neve archive sweep --repair` finds it 48 h old: the object {key}"
    for one in remains["local_log"]:
        until = "an unknown time" if one["until_ms"] is None else time_text(one["until_ms"])
        yield f"remains       until {until} in the local log: {one['rows']} of {one['topic']} queue {one['queue']}"
        yield f"              {_returned(one)}"
    if remains["other_members"]:
        yield "remains       in the local logs and cold caches of the set's other members, as long as they keep them;"
        yield "              no request returns them once a member has read the journal"
        yield "              their quarantine/ is not searched"


def _returned(copies: Mapping[str, Any]) -> str:
    left = copies["rows"] - copies["hidden"]
    if left:
        return f"of these {left} may still be returned: nobody could look whether they have the key, or hide them"
    return "on the disk alone: no request returns them"
