"""The options of `format("neve")`, with the names and forms of Spark's Kafka source where they mean the same. Pure.

A queue is Kafka's partition. Offsets can be per broker, if several have a topic: {"orders": {"broker-a": {"0": 23}}}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from neve.archive.read.selection import instant_ms

EARLIEST, LATEST = "earliest", "latest"
_EARLIEST, _LATEST = -2, -1  # in Kafka's JSON

TASK_BYTES = 64 << 20  # of records on the wire; a core decodes them in about 3 s

_SUBSCRIPTIONS = ("topic", "subscribe", "subscribePattern", "assign")
_OF_BOTH = (
    *("store", "path", *_SUBSCRIPTIONS, "broker", "startingOffsets", "startingTimestamp", "failOnDataLoss"),
    *("minPartitions", "maxBytesPerPartition", "key", "tag"),
    *("namesrv", "retiredBrokers", "pollTimeoutMs"),
    *("consumerGroup", "credentials", "accessKey", "secretKey", "tls", "tlsCa", "tlsCert", "tlsKey"),
)
_OF_BATCHES = ("endingOffsets", "endingTimestamp", "pushFilters")
_OF_STREAMS = ("maxOffsetsPerTrigger",)
# Options of the Kafka source that this source does not have, and what to use instead.
_INSTEAD = {
    "kafka.bootstrap.servers": "use the option store for the archive, and namesrv for name servers",
    "startingoffsetsbytimestamp": "use startingTimestamp, one time for all queues",
    "endingoffsetsbytimestamp": "use endingTimestamp, one time for all queues",
    "minoffsetspertrigger": "use a longer trigger interval",
    "maxtriggerdelay": "use a longer trigger interval",
    "groupidprefix": "use the option consumerGroup",
    "kafka.group.id": "use the option consumerGroup",
    "kafkaconsumer.polltimeoutms": "use the option pollTimeoutMs",
    "includeheaders": "the column properties contains them, as a map",
}


class BadOption(ValueError):
    """An option is unknown, invalid, or excluded by another."""


class Offsets(NamedTuple):
    """Offsets by (topic, broker or None for any, queue); `otherwise`, earliest or latest, of all other queues."""

    by_queue: Mapping[tuple[str, str | None, int], int]
    otherwise: str

    def of(self, topic: str, broker: str, queue: int) -> int | str:
        """Return an offset, earliest or latest."""
        found = self.by_queue.get((topic, broker, queue), self.by_queue.get((topic, None, queue)))
        if found is None:
            return self.otherwise
        return {_EARLIEST: EARLIEST, _LATEST: LATEST}.get(found, found)


class TopicSelection(NamedTuple):
    """Topics by names or a pattern, and their queues (None: all)."""

    names: frozenset[str] = frozenset()
    pattern: str | None = None
    queues: Mapping[str, frozenset[int]] | None = None

    def has(self, topic: str) -> bool:
        """Return whether a topic of this name is subscribed."""
        return topic in self.names if self.pattern is None else re.fullmatch(self.pattern, topic) is not None

    def has_queue(self, topic: str, queue: int) -> bool:
        """Return whether a queue of a subscribed topic is."""
        return self.queues is None or queue in self.queues[topic]


@dataclass(frozen=True, slots=True)
class Security:
    """Credentials, or the file that has them, and PEM files for TLS."""

    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)
    credentials_file: str | None = None
    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None


class Cluster(NamedTuple):
    """The brokers that have unarchived messages.

    Args:
        group: for which the progress of a stream is committed; it need not be a group of consumers.
        retired: brokers that are removed for good; the archive has all of their messages.
        patience_s: a queue without an answer for this time fails its task.
    """

    namesrv: str
    security: Security = Security()
    group: str | None = None
    retired: frozenset[str] = frozenset()
    patience_s: float = 60.0


class Options(NamedTuple):
    """The options of a query.

    Args:
        since, until: store time in [since, until), milliseconds.
        most_rows: of a batch of a stream.
        cluster: None reads only the archive.
    """

    store: str
    subscription: TopicSelection
    broker: str | None = None
    starting: Offsets = Offsets({}, EARLIEST)
    ending: Offsets = Offsets({}, LATEST)
    since: int | None = None
    until: int | None = None
    key: str | None = None
    tags: frozenset[str] | None = None
    pushes_filters: bool = False
    fails_on_data_loss: bool = True
    most_rows: int | None = None
    task_bytes: int = TASK_BYTES
    least_tasks: int = 1
    cluster: Cluster | None = None


def options_of_batch(options: Mapping[str, str]) -> Options:
    """Parse the options of a batch query. Raises BadOption."""
    given = _known(options, (*_OF_BOTH, *_OF_BATCHES), {"maxOffsetsPerTrigger": "only streams have it"})
    if given.get("startingoffsets", "").lower() == LATEST:
        raise BadOption("option startingOffsets: a batch cannot begin at the latest offset")
    if given.get("endingoffsets", "").lower() == EARLIEST:
        raise BadOption("option endingOffsets: a batch cannot end at the earliest offset")
    return _common(given, EARLIEST)._replace(
        ending=_offsets("endingOffsets", given.get("endingoffsets", LATEST), otherwise=LATEST),
        until=_time("endingTimestamp", given.get("endingtimestamp")),
        pushes_filters=_flag("pushFilters", given.get("pushfilters", "false")),
    )


def options_of_stream(options: Mapping[str, str]) -> Options:
    """Parse the options of a stream. Raises BadOption."""
    no_end = dict.fromkeys(_OF_BATCHES, "a stream has no end") | {
        "pushFilters": "Spark does not push filters to streams"
    }
    given = _known(options, (*_OF_BOTH, *_OF_STREAMS), no_end)
    most = given.get("maxoffsetspertrigger")
    return _common(given, LATEST)._replace(
        most_rows=None if most is None else _number("maxOffsetsPerTrigger", most, least=1)
    )


def _known(options: Mapping[str, str], names: tuple[str, ...], elsewhere: Mapping[str, str]) -> dict[str, str]:
    """Return options by lower-case names, as Spark passes them. Raises BadOption for an unknown one."""
    given = {name.lower(): value for name, value in options.items()}
    reasons = {name.lower(): reason for name, reason in elsewhere.items()} | _INSTEAD
    known = {name.lower() for name in names}
    for name in sorted(set(given) - known):
        raise BadOption(f"option {name}: {reasons.get(name, 'unknown; options are ' + ', '.join(sorted(names)))}")
    return given


def _common(given: Mapping[str, str], otherwise: str) -> Options:
    if ("store" in given) == ("path" in given):
        raise BadOption("exactly one of the options store and path is required: s3://BUCKET/PREFIX, or dir:PATH")
    since = _time("startingTimestamp", given.get("startingtimestamp"))
    starting = given.get("startingoffsets", otherwise) if since is None else EARLIEST  # a time overrides offsets
    return Options(
        store=given.get("store") or given["path"],
        subscription=_subscription(given),
        broker=given.get("broker"),
        # A queue that the JSON does not name begins like a new one.
        starting=_offsets("startingOffsets", starting, otherwise=EARLIEST),
        since=since,
        key=given.get("key"),
        tags=None if "tag" not in given else frozenset(one.strip() for one in given["tag"].split("||")),
        fails_on_data_loss=_flag("failOnDataLoss", given.get("failondataloss", "true")),
        task_bytes=_number("maxBytesPerPartition", given.get("maxbytesperpartition", str(TASK_BYTES)), least=1),
        least_tasks=_number("minPartitions", given.get("minpartitions", "1"), least=1),
        cluster=_cluster(given),
    )


_OF_CLUSTERS = (
    *("retiredBrokers", "pollTimeoutMs", "consumerGroup"),
    *("credentials", "accessKey", "secretKey", "tls", "tlsCa", "tlsCert", "tlsKey"),
)


def _cluster(given: Mapping[str, str]) -> Cluster | None:
    namesrv = given.get("namesrv")
    if namesrv is None:
        for name in _OF_CLUSTERS:
            if name.lower() in given:
                raise BadOption(f"option {name} requires the option namesrv")
        return None
    if not namesrv.strip():
        raise BadOption("option namesrv is empty: host:port, several joined by ;")
    retired = frozenset(one.strip() for one in given.get("retiredbrokers", "").split(",") if one.strip())
    patience_ms = _number("pollTimeoutMs", given.get("polltimeoutms", "60000"), least=1)
    return Cluster(namesrv, _security(given), given.get("consumergroup"), retired, patience_ms / 1000)


def _security(given: Mapping[str, str]) -> Security:
    access_key, secret_key, file = given.get("accesskey"), given.get("secretkey"), given.get("credentials")
    if bool(access_key) != bool(secret_key):
        raise BadOption("options accessKey and secretKey require each other")
    if access_key and file:
        raise BadOption("options credentials and accessKey exclude each other")
    trusted, certificate, key = (given.get(name) for name in ("tlsca", "tlscert", "tlskey"))
    if (certificate is None) != (key is None):
        raise BadOption("options tlsCert and tlsKey require each other")
    tls = _flag("tls", given.get("tls", "true" if trusted or certificate else "false"))
    return Security(access_key, secret_key, file, tls, trusted, certificate, key)


def _subscription(given: Mapping[str, str]) -> TopicSelection:
    found = [name for name in _SUBSCRIPTIONS if name.lower() in given]
    if len(found) != 1:
        raise BadOption(f"exactly one of the options {', '.join(_SUBSCRIPTIONS)} is required")
    (name,) = found
    value = given[name.lower()]
    if name == "subscribePattern":
        try:
            re.compile(value)
        except re.error as error:
            raise BadOption(f"option subscribePattern: {error}") from error
        return TopicSelection(pattern=value)
    if name == "assign":
        queues = {
            topic: frozenset(_number("assign", one, least=0) for one in listed)
            for topic, listed in _json("assign", value).items()
            if isinstance(listed, list)
        }
        if not queues or len(queues) < len(_json("assign", value)):
            raise BadOption('option assign must be JSON like {"orders": [0, 1]}')
        return TopicSelection(names=frozenset(queues), queues=queues)
    names = [value] if name == "topic" else [one.strip() for one in value.split(",")]
    if not all(names):
        raise BadOption(f"option {name} has an empty name")
    return TopicSelection(names=frozenset(names))


def _offsets(name: str, value: str, *, otherwise: str) -> Offsets:
    if value.lower() in {EARLIEST, LATEST}:
        return Offsets({}, value.lower())
    found: dict[tuple[str, str | None, int], int] = {}
    for topic, of_topic in _json(name, value).items():
        if not isinstance(of_topic, dict):
            raise BadOption(f"option {name}: topic {topic} has no object of offsets by queue")
        for queue_or_broker, one in of_topic.items():
            if isinstance(one, dict):
                found |= {
                    (topic, queue_or_broker, _number(name, queue, least=0)): _number(name, offset, least=_EARLIEST)
                    for queue, offset in one.items()
                }
            else:
                found[topic, None, _number(name, queue_or_broker, least=0)] = _number(name, one, least=_EARLIEST)
    return Offsets(found, otherwise)


def _json(name: str, value: str) -> dict[str, object]:
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadOption(
            f'option {name} must be earliest, latest, or JSON like {{"orders": {{"0": 23}}}}, got {value[:60]!r}'
        )
    return found


def _number(name: str, value: object, *, least: int) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = least - 1
    if number < least:
        raise BadOption(f"option {name} must be a number of at least {least}, got {value!r}")
    return number


def _flag(name: str, value: str) -> bool:
    if value.lower() not in {"true", "false"}:
        raise BadOption(f"option {name} must be true or false, got {value!r}")
    return value.lower() == "true"


def _time(name: str, value: str | None) -> int | None:
    if value is None:
        return None
    try:
        return int(value) if value.lstrip("-").isdigit() else instant_ms(value)
    except ValueError as error:
        raise BadOption(f"option {name} must be milliseconds since 1970 or ISO 8601, got {value!r}") from error
