"""The certificate of an erasure as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neve.cli.output import time_text


def certificate(event: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a certificate; for a dry run, how much it found."""
    if event.get("event") != "certificate":
        rows, objects = event.get("rows", 0), event.get("objects", 0)
        yield f"{rows} messages in {objects} archived objects of {event.get('topic', '')}"
        return
    yield f"erasure       {event['id']}, {time_text(event['time_ms'])}"
    yield f"broker        {event['broker']}, only its part"
    yield f"topic         {event['topic']}"
    yield f"key           SHA-256 of the id, a colon and the key: {event['key_sha256']}"
    yield f"erased        {event['rows']} messages" + ("" if event["complete"] else ", NOT ALL")
    for part in event["erased"]:
        offsets = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in part["offsets"])
        yield f"              {part['topic']} queue {part['queue']}: {offsets}"
    for file in event["quarantine"]:
        yield f"deleted       the quarantined record {file}"
    yield from _remains(event["remains"])


def _remains(remains: Mapping[str, Any]) -> Iterator[str]:
    for one in remains["objects"]:
        yield f"remains       until {time_text(one['until_ms'])} in the object {one['key']}"
    for key in remains["in_no_view"]:
        yield f"remains       as an orphan, until `neve archive sweep --repair` deletes it after 48 h: the object {key}"
    for one in remains["local_log"]:
        until = "an unknown time" if one["until_ms"] is None else time_text(one["until_ms"])
        yield f"remains       until {until} in the local log: {one['rows']} of {one['topic']} queue {one['queue']}"
        yield f"              {_returned(one)}"
    if remains["other_members"]:
        yield "remains       in the local logs and cold caches of the other members, until these delete them;"
        yield "              no request returns them after a member has read the journal"
        yield "              their quarantine/ is not searched"


def _returned(copies: Mapping[str, Any]) -> str:
    left = copies["rows"] - copies["hidden"]
    if left:
        return f"of these {left} may still be returned: their keys could not be checked, or they could not be hidden"
    return "on the disk only: no request returns them"
