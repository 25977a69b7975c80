"""`neve group` like a user runs it, with the expected output for a small cluster of either kind of broker."""

from __future__ import annotations

from neve.client.sync import connect
from tests.kit.cluster.command import Command

#: The group has read the first two of five messages in queue 0, and nothing of the only one in queue 1.
GROUP, TOPIC = "billing", "orders"
COUNTS = {0: 5, 1: 1}
LEFT = {0: 3, 1: 1}


def fill(namesrv: str) -> None:
    """Create the topic, its messages, and a disconnected group that has read some of them."""
    with connect(namesrv) as client:
        client.admin.create_topic(TOPIC, 2)
        for queue, count in COUNTS.items():
            for number in range(count):
                client.send(TOPIC, f"{queue}-{number}", queue=queue)
        with client.consumer(GROUP, TOPIC, start="earliest") as consumer:  # The pull creates the group.
            for seen, _ in enumerate(consumer, 1):
                if seen == sum(COUNTS.values()):
                    break
        for queue, offset in ((0, 2), (1, 0)):
            client.commit(GROUP, TOPIC, queue, offset)


def is_request_in_flight(neve: Command) -> None:
    """Check the output of `list`, `lag` and `describe`."""
    (listed,) = (row for row in neve.json("list") if row["group"] == GROUP)
    assert (listed["members"], listed["lag"]) == (0, 4)
    names = {row["group"] for row in neve.json("list", "--all")}
    assert {GROUP, "TOOLS_CONSUMER"} <= names
    assert "TOOLS_CONSUMER" not in neve("list")

    rows = [row for row in neve.json("lag", GROUP) if row["topic"] == TOPIC]
    assert {row["queue"]: row["lag"] for row in rows} == LEFT
    assert {row["queue"]: (row["committed"], row["max_offset"]) for row in rows} == {0: (2, 5), 1: (0, 1)}
    assert all(0 <= row["behind_ms"] < 600_000 for row in rows)
    assert "4 messages behind, the oldest for " in neve.err
    assert neve.json("lag", GROUP, "--topic", TOPIC) and not neve.json("lag", GROUP, "--topic", "other")
    neve("lag", "nobody", code=3)

    told = neve.json("describe", GROUP)
    assert (told["group"], told["members"], told["lag"], told["retry_max_times"]) == (GROUP, [], 4, 16)
    assert {one["queue"]: one["lag"] for one in told["queues"] if one["topic"] == TOPIC} == LEFT
    assert "retry_max_times" in neve("describe", GROUP)
    neve("describe", "nobody", code=3)


def members_are_told(neve: Command, namesrv: str) -> None:
    """Check the members: all queues are assigned while they are connected, and there are none afterwards."""
    with connect(namesrv) as client, client.consumer(GROUP, TOPIC) as consumer:
        assert next(iter(consumer)) is not None
        (member,) = neve.json("members", GROUP)
        assert member["client_id"] == client.client_id
        assert (member["version"], member["address"].partition(":")[0]) == ("5.3.3", "127.0.0.1")
        assert [one["queue"] for one in member["queues"] if one["topic"] == TOPIC] == [0, 1]
        assert f"{TOPIC}@" in neve("members", GROUP) and ":0,1" in neve("members", GROUP)
        (listed,) = (row for row in neve.json("list") if row["group"] == GROUP)
        assert (listed["members"], listed["model"]) == (1, "clustering")
    assert neve.json("members", GROUP) == []
    neve("members", "nobody", code=3)


def reset_matches_preview(neve: Command, namesrv: str) -> None:
    """Reset forward and back: by offset, by time, to both ends; refused while a member is connected."""
    here = ("reset", GROUP, "--topic", TOPIC)

    def moved(*arguments: str) -> dict[int, tuple[int, int, int]]:
        rows = neve.json(*here, *arguments, "--yes")
        shown = {row["queue"]: (row["target"], row["skipped"], row["repeated"]) for row in rows}
        told = {row["queue"]: row["committed"] for row in neve.json("lag", GROUP, "--topic", TOPIC)}
        assert {queue: told[queue] for queue in shown} == {queue: target for queue, (target, _, _) in shown.items()}
        return shown

    (row,) = neve.json(*here, "--queue", "0", "--to-offset", "4", "--dry-run")
    assert (row["committed"], row["target"], row["skipped"], row["repeated"]) == (2, 4, 2, 0)
    assert [one["committed"] for one in neve.json("lag", GROUP, "--topic", TOPIC)] == [2, 0]
    assert moved("--queue", "0", "--to-offset", "4") == {0: (4, 2, 0)}
    assert moved("--to-earliest") == {0: (0, 0, 4), 1: (0, 0, 0)}
    assert moved("--to-latest") == {0: (5, 5, 0), 1: (1, 1, 0)}
    assert moved("--to-time", "2020-01-01") == {0: (0, 0, 5), 1: (0, 0, 1)}
    neve(*here, "--to-offset", "6", "--queue", "0", "--yes", code=2)
    neve(*here, "--queue", "7", "--to-earliest", "--yes", code=3)
    neve("reset", "nobody", "--to-earliest", "--yes", code=3)
    neve("reset", GROUP, "--to-earliest", "--to-latest", code=2)

    moved("--to-latest")
    with connect(namesrv) as client, client.consumer(GROUP, TOPIC) as consumer:
        client.send(TOPIC, "now", queue=0)
        assert next(iter(consumer)).body == b"now"
        neve(*here, "--to-earliest", "--yes", code=5)
        assert "1 members" in neve.err
        neve(*here, "--to-earliest", "--dry-run")
        assert "refused until they are stopped" in neve.err
    moved("--queue", "1", "--to-earliest")


def a_deleted_group_is_gone(neve: Command, namesrv: str) -> None:
    with connect(namesrv) as client, client.consumer(GROUP, TOPIC, start="earliest") as consumer:
        client.send(TOPIC, "again", queue=0)
        assert next(iter(consumer)) is not None
        neve("delete", GROUP, "--yes", code=5)
    neve("delete", GROUP, "--yes")
    assert GROUP not in {row["group"] for row in neve.json("list")}
    neve("lag", GROUP, code=3)
    neve("delete", GROUP, "--yes", code=3)
