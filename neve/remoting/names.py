"""Names, permissions and attributes of the protocol.

Source: RocketMQ's TopicValidator, MixAll, PermName, KeyBuilder, TopicAttributes. An ambiguous name of a retry topic is
resolved with a broker's tables (broker.tables.retry_names).
"""

import re
from collections.abc import Mapping

PERM_READ, PERM_WRITE, PERM_INHERIT = 4, 2, 1

RETRY_PREFIX = "%RETRY%"
DLQ_PREFIX = "%DLQ%"
DEFAULT_TOPIC = "TBW102"
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_HALF_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
CHECK_MAX_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
SELF_TEST_TOPIC = "SELF_TEST_TOPIC"
OFFSET_MOVED_TOPIC = "OFFSET_MOVED_EVENT"
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"
BENCHMARK_TOPIC = "BenchmarkTest"
WHEEL_TIMER_TOPIC = "rmq_sys_wheel_timer"
# Topics whose pending records are pinned (`broker.archiving.pins`); their other records can be deleted.
PINNED_TOPICS = frozenset({SCHEDULE_TOPIC, HALF_TOPIC, OP_HALF_TOPIC, WHEEL_TIMER_TOPIC})
SYSTEM_PREFIX = "rmq_sys_"
REVIVE_LOG_PREFIX = "rmq_sys_REVIVE_LOG_"
#: Changes of topics, groups, users and offsets (`broker.tables.changes`). Hidden from clients.
METADATA_LOG = "rmq_sys_METADATA_LOG"

SYSTEM_TOPICS = frozenset(
    {DEFAULT_TOPIC, SCHEDULE_TOPIC, BENCHMARK_TOPIC, HALF_TOPIC, TRACE_TOPIC, OP_HALF_TOPIC, CHECK_MAX_TOPIC}
    | {SELF_TEST_TOPIC, OFFSET_MOVED_TOPIC}
)
#: Topics that only brokers write.
NOT_FOR_SENDING = frozenset(
    {SCHEDULE_TOPIC, HALF_TOPIC, OP_HALF_TOPIC, CHECK_MAX_TOPIC, SELF_TEST_TOPIC, OFFSET_MOVED_TOPIC}
)
# The broker executes the records of these topics.
_EXECUTED = (REVIVE_LOG_PREFIX, METADATA_LOG, WHEEL_TIMER_TOPIC, f"{SYSTEM_PREFIX}SYNC_BROKER_MEMBER_")

TOPIC_LENGTH_MAX = 127
RETRY_TOPIC_LENGTH_MAX = 255
GROUP_LENGTH_MAX = 120
_ILLEGAL = re.compile(r"[^%|A-Za-z0-9_-]")

RESERVE_TIME = "reserve.time"
_ATTRIBUTE_VALUES = {
    "queue.type": ("SimpleCQ", "BatchCQ"),
    "cleanup.policy": ("DELETE", "COMPACTION"),
    "message.type": ("UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION"),
}
_UNCHANGEABLE = ("queue.type", "cleanup.policy")
#: Attribute values that are stored and reported but have no effect.
WITHOUT_EFFECT = {"queue.type": "BatchCQ", "cleanup.policy": "COMPACTION"}
_RESERVE_TIME_MAX = 2**53


def topic_fault(topic: str) -> str | None:
    """Return why a topic name is invalid; None if it is valid."""
    if not topic or topic.isspace():
        return "The specified topic is blank."
    # A pop-retry topic of version 2 has a + between group and topic.
    plain = topic.replace("+", "", 1) if topic.startswith(RETRY_PREFIX) else topic
    if _ILLEGAL.search(plain):
        return "The specified topic contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
    limit = RETRY_TOPIC_LENGTH_MAX if is_retry_or_dlq(topic) else TOPIC_LENGTH_MAX
    if len(topic) > limit:
        return f"The specified topic is longer than topic max length {limit}."
    return None


def group_fault(group: str) -> str | None:
    """Return why a group name is invalid; None if it is valid."""
    if not group or group.isspace():
        return "The specified group is blank."
    if _ILLEGAL.search(group):
        return "The specified group contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
    if len(group) > GROUP_LENGTH_MAX:
        return f"The specified group is longer than group max length {GROUP_LENGTH_MAX}."
    return None


#: Groups of RocketMQ's servers and tools.
SYSTEM_GROUPS = (
    "TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP", "CID_ONSAPI_OWNER",
    "CID_ONSAPI_PERMISSION", "CID_ONSAPI_PULL", "CID_ONS-HTTP-PROXY", "CID_RMQ_SYS_TRANS",
)  # fmt: skip
_SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"


def is_system_group(group: str) -> bool:
    """Return whether a group belongs to RocketMQ's servers and tools."""
    return group in SYSTEM_GROUPS or group.startswith(_SYSTEM_GROUP_PREFIX)


def is_retry_or_dlq(topic: str) -> bool:
    """Return whether a topic is a group's retry or dead-letter topic."""
    return topic.startswith((RETRY_PREFIX, DLQ_PREFIX))


#: The topic of a popped message in a receipt: the topic itself, or the retry topic of group and topic in either form.
NORMAL, RETRY_V1, RETRY_V2 = "0", "1", "2"


def real_topic(topic: str, group: str, retry: str) -> str:
    """Return the topic of a receipt or of a short acknowledgement, whose values are not validated."""
    return topic if retry == NORMAL else f"{RETRY_PREFIX}{group}{'+' if retry == RETRY_V2 else '_'}{topic}"


def retry_version(stored: str, group: str, topic: str) -> str:
    """Return the marker of a receipt for the topic that stores its message."""
    if stored == topic:
        return NORMAL
    return RETRY_V2 if stored == real_topic(topic, group, RETRY_V2) else RETRY_V1


def may_be_sent_to(topic: str) -> bool:
    """Return whether clients may send to a topic, because the broker does not write it itself."""
    return topic not in NOT_FOR_SENDING and not topic.startswith(_EXECUTED)


def is_internal(topic: str) -> bool:
    """Return whether only a broker's own modules write to a topic."""
    return not may_be_sent_to(topic)


def is_hidden(topic: str) -> bool:
    """Return whether a topic is hidden from clients, because its records contain users' secrets."""
    return topic == METADATA_LOG


def is_system_topic(topic: str) -> bool:
    """Return whether a topic belongs to RocketMQ itself."""
    return topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_PREFIX)


def parse_attributes(text: str) -> dict[str, str]:
    """Parse `+k1=v1,-k2` into signed name → value. Raises ValueError."""
    changes: dict[str, str] = {}
    for part in filter(None, (item.strip() for item in text.split(","))):
        name, separator, value = part.partition("=")
        if part[0] not in "+-" or (part[0] == "+") != bool(separator) or len(name) < 2:
            raise ValueError(f"attribute {part!r} is not +key=value or -key")
        if any(name[1:] == seen[1:] for seen in changes):
            raise ValueError(f"attribute {name[1:]} is given twice")
        changes[name] = value
    return changes


def apply_attributes(current: Mapping[str, str], changes: Mapping[str, str], *, creating: bool) -> dict[str, str]:
    """Return the attributes after the changes. Raises ValueError for an unsupported key or value."""
    result = dict(current)
    for signed, value in changes.items():
        name = signed[1:]
        if name != RESERVE_TIME and name not in _ATTRIBUTE_VALUES:
            raise ValueError(f"unsupported attribute {name}")
        if name in _UNCHANGEABLE and not creating and result.get(name, _ATTRIBUTE_VALUES[name][0]) != value:
            raise ValueError(f"attribute {name} can't be changed")
        if signed[0] == "-":
            result.pop(name, None)
            continue
        if name == RESERVE_TIME:
            check_reserve_time(value)
        elif value not in _ATTRIBUTE_VALUES[name]:
            raise ValueError(f"attribute {name}={value}: allowed are {', '.join(_ATTRIBUTE_VALUES[name])}")
        result[name] = value
    return result


def check_reserve_time(value: str) -> None:
    """Check a topic's TTL in whole hours; -1 is the broker's default. Raises ValueError, also for 0."""
    try:
        hours = int(value if value.isascii() else "")
    except ValueError as error:
        raise ValueError(f"reserve.time={value}: whole hours are expected") from error
    if hours == 0 or hours < -1 or hours > _RESERVE_TIME_MAX:
        raise ValueError(f"reserve.time={value}: allowed are -1 (the broker's default) and whole hours from 1")
