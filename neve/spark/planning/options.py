"""What a query asks for, from the options of `format("neve")`: named as Spark's Kafka source names them. Pure.

What is the same there and here has the same name and the same form; a queue is Kafka's partition. Where several brokers
have a topic, its offsets may be told for each: {"orders": {"broker-a": {"0": 23}}}.
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

TASK_BYTES = 64 << 20  # of records as they were on the wire: some 3 s of a core that decodes

_SUBSCRIPTIONS = ("topic", "subscribe", "subscribePattern", "assign")
_OF_BOTH = (
    *("store", "path", *_SUBSCRIPTIONS, "broker", "startingOffsets", "startingTimestamp", "failOnDataLoss"),
    *("minPartitions", "maxBytesPerPartition", "key", "tag"),
    *("namesrv", "retiredBrokers", "pollTimeoutMs"),
    *("consumerGroup", "credentials", "accessKey", "secretKey", "tls", "tlsCa", "tlsCert", "tlsKey"),
)
_OF_BATCHES = ("endingOffsets", "endingTimestamp", "pushFilters")
_OF_STREAMS = ("maxOffsetsPerTrigger",)
# Kafka's, of which somebody who comes from there may think that they do something here.
_INSTEAD = {
    "kafka.bootstrap.servers": "the archive is the option store; the brokers' name servers are the option namesrv",
    "startingoffsetsbytimestamp": "startingTimestamp is one time for all queues",
    "endingoffsetsbytimestamp": "endingTimestamp is one time for all queues",
    "minoffsetspertrigger": "a longer trigger gathers more",
    "maxtriggerdelay": "a longer trigger gathers more",
    "groupidprefix": "the group that brokers are told of is the option consumerGroup",
    "kafka.group.id": "the group that brokers are told of is the option consumerGroup",
    "kafkaconsumer.polltimeoutms": "it is the option pollTimeoutMs",
    "includeheaders": "properties are always there, as a map",
}


class BadOption(ValueError):
    """An option that is not known, does not go with another, or says what can't be."""


class Offsets(NamedTuple):
    """(topic, broker or any, queue) -> offset; of any other queue, `otherwise`: earliest or latest."""

    told: Mapping[tuple[str, str | None, int], int]
    otherwise: str

    def of(self, topic: str, broker: str, queue: int) -> int | str:
        """An offset, earliest or latest."""
        found = self.told.get((topic, broker, queue), self.told.get((topic, None, queue)))
        if found is None:
            return self.otherwise
        return {_EARLIEST: EARLIEST, _LATEST: LATEST}.get(found, found)


class Subscription(NamedTuple):
    """Which topics, and which queues of them."""

    names: frozenset[str] = frozenset()
    pattern: str | None = None
    queues: Mapping[str, frozenset[int]] | None = None  # None: all

    def has(self, topic: str) -> bool:
        """By its name alone, whether or not it exists."""
        return topic in self.names if self.pattern is None else re.fullmatch(self.pattern, topic) is not None

    def has_queue(self, topic: str, queue: int) -> bool:
        """Of a topic that it has."""
        return self.queues is None or queue in self.queues[topic]


@dataclass(frozen=True, slots=True)
class Security:
    """Who signs, and what is trusted: keys or the file that has them, and PEM files."""

    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)
    credentials_file: str | None = None
    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None


class Cluster(NamedTuple):
    """The brokers that have what is not archived yet."""

    namesrv: str
    security: Security = Security()
    #: Whom the brokers are told of; it need not be a group of consumers.
    group: str | None = None
    #: Brokers that are gone for good: all that there is of theirs is in the archive.
    retired: frozenset[str] = frozenset()
    patience_s: float = 60.0  # a queue that gives nothing for so long fails its task


class Options(NamedTuple):
    """`since`, `until`: store time, the end excluded, in milliseconds."""

    store: str
    subscription: Subscription
    broker: str | None = None
    starting: Offsets = Offsets({}, EARLIEST)
    ending: Offsets = Offsets({}, LATEST)
    since: int | None = None
    until: int | None = None
    key: str | None = None
    tags: frozenset[str] | None = None
    pushes_filters: bool = False
    fails_on_data_loss: bool = True
    most_rows: int | None = None  # of a batch of a stream
    task_bytes: int = TASK_BYTES
    least_tasks: int = 1
    cluster: Cluster | None = None  # None: what is archived, and nothing else


def options_of_batch(told: Mapping[str, str]) -> Options:
    """Raises BadOption."""
    given = _known(told, (*_OF_BOTH, *_OF_BATCHES), {"maxOffsetsPerTrigger": "it is for streams"})
    if given.get("startingoffsets", "").lower() == LATEST:
        raise BadOption("startingOffsets: a batch can't begin at the latest, nothing follows it")
    if given.get("endingoffsets", "").lower() == EARLIEST:
        raise BadOption("endingOffsets: a batch can't end at the earliest, nothing lies before it")
    return _common(given, EARLIEST)._replace(
        ending=_offsets("endingOffsets", given.get("endingoffsets", LATEST), otherwise=LATEST),
        until=_time("endingTimestamp", given.get("endingtimestamp")),
        pushes_filters=_flag("pushFilters", given.get("pushfilters", "false")),
    )


def options_of_stream(told: Mapping[str, str]) -> Options:
    """Raises BadOption."""
    no_end = dict.fromkeys(_OF_BATCHES, "a stream has no end") | {"pushFilters": "Spark tells a stream no filters"}
    given = _known(told, (*_OF_BOTH, *_OF_STREAMS), no_end)
    most = given.get("maxoffsetspertrigger")
    return _common(given, LATEST)._replace(
        most_rows=None if most is None else _number("maxOffsetsPerTrigger", most, least=1)
    )


def _known(told: Mapping[str, str], names: tuple[str, ...], elsewhere: Mapping[str, str]) -> dict[str, str]:
    """By lower-case names, as Spark has them. What is not known is refused: it would do nothing, unnoticed."""
    given = {name.lower(): value for name, value in told.items()}
    reasons = {name.lower(): reason for name, reason in elsewhere.items()} | _INSTEAD
    known = {name.lower() for name in names}
    for name in sorted(set(given) - known):
        raise BadOption(f"option {name}: {reasons.get(name, 'not known; there are ' + ', '.join(sorted(names)))}")
    return given


def _common(given: Mapping[str, str], otherwise: str) -> Options:
    if ("store" in given) == ("path" in given):
        raise BadOption("one of the options store and path names the archive: s3://BUCKET/PREFIX, or dir:PATH")
    since = _time("startingTimestamp", given.get("startingtimestamp"))
    starting = given.get("startingoffsets", otherwise) if since is None else EARLIEST  # a time counts before offsets
    return Options(
        store=given.get("store") or given["path"],
        subscription=_subscription(given),
        broker=given.get("broker"),
        # A queue that is not told begins where a new one does.
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
                raise BadOption(f"option {name}: it is about brokers, and goes with namesrv")
        return None
    if not namesrv.strip():
        raise BadOption("option namesrv names no name server: host:port, several joined by ;")
    retired = frozenset(one.strip() for one in given.get("retiredbrokers", "").split(",") if one.strip())
    patience_ms = _number("pollTimeoutMs", given.get("polltimeoutms", "60000"), least=1)
    return Cluster(namesrv, _security(given), given.get("consumergroup"), retired, patience_ms / 1000)


def _security(given: Mapping[str, str]) -> Security:
    access_key, secret_key, file = given.get("accesskey"), given.get("secretkey"), given.get("credentials")
    if bool(access_key) != bool(secret_key):
        raise BadOption("options accessKey and secretKey go together")
    if access_key and file:
        raise BadOption("options credentials and accessKey both say who signs: one of them")
    trusted, certificate, key = (given.get(name) for name in ("tlsca", "tlscert", "tlskey"))
    if (certificate is None) != (key is None):
        raise BadOption("options tlsCert and tlsKey go together")
    tls = _flag("tls", given.get("tls", "true" if trusted or certificate else "false"))
    return Security(access_key, secret_key, file, tls, trusted, certificate, key)


def _subscription(given: Mapping[str, str]) -> Subscription:
    found = [name for name in _SUBSCRIPTIONS if name.lower() in given]
    if len(found) != 1:
        raise BadOption(f"exactly one of the options {', '.join(_SUBSCRIPTIONS)} says which topics")
    (name,) = found
    value = given[name.lower()]
    if name == "subscribePattern":
        try:
            re.compile(value)
        except re.error as error:
            raise BadOption(f"option subscribePattern: {error}") from error
        return Subscription(pattern=value)
    if name == "assign":
        queues = {
            topic: frozenset(_number("assign", one, least=0) for one in listed)
            for topic, listed in _json("assign", value).items()
            if isinstance(listed, list)
        }
        if not queues or len(queues) < len(_json("assign", value)):
            raise BadOption('option assign is JSON like {"orders": [0, 1]}')
        return Subscription(names=frozenset(queues), queues=queues)
    names = [value] if name == "topic" else [one.strip() for one in value.split(",")]
    if not all(names):
        raise BadOption(f"option {name} names no topic")
    return Subscription(names=frozenset(names))


def _offsets(name: str, value: str, *, otherwise: str) -> Offsets:
    if value.lower() in {EARLIEST, LATEST}:
        return Offsets({}, value.lower())
    told: dict[tuple[str, str | None, int], int] = {}
    for topic, of_topic in _json(name, value).items():
        if not isinstance(of_topic, dict):
            raise BadOption(f"option {name}: {topic} has no offsets by queue")
        for queue_or_broker, one in of_topic.items():
            if isinstance(one, dict):
                told |= {
                    (topic, queue_or_broker, _number(name, queue, least=0)): _number(name, offset, least=_EARLIEST)
                    for queue, offset in one.items()
                }
            else:
                told[topic, None, _number(name, queue_or_broker, least=0)] = _number(name, one, least=_EARLIEST)
    return Offsets(told, otherwise)


def _json(name: str, value: str) -> dict[str, object]:
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadOption(
            f'option {name} is earliest, latest, or JSON like {{"orders": {{"0": 23}}}}, not {value[:60]!r}'
        )
    return found


def _number(name: str, value: object, *, least: int) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = least - 1
    if number < least:
        raise BadOption(f"option {name}: {value!r} is no number of at least {least}")
    return number


def _flag(name: str, value: str) -> bool:
    if value.lower() not in {"true", "false"}:
        raise BadOption(f"option {name} is true or false, not {value!r}")
    return value.lower() == "true"


def _time(name: str, value: str | None) -> int | None:
    if value is None:
        return None
    try:
        return int(value) if value.lstrip("-").isdigit() else instant_ms(value)
    except ValueError as error:
        raise BadOption(f"option {name}: milliseconds since 1970, or ISO 8601, not {value!r}") from error
