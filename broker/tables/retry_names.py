"""Names of retry topics, and the groups and topics that they denote.

    %RETRY%group          messages that consumers sent back; all clients know this name
    %RETRY%group_topic    messages popped from the topic and not acknowledged in time (V1)
    %RETRY%group+topic    the same in V2 (`enableRetryTopicV2`); names of groups and topics contain no +

A V1 name is ambiguous if it has several underscores or is a group's own name. %RETRY%a_b holds what group a_b sent
back, or what group a popped from b. The tables of topics and groups decide which of these exist. If more than one is
possible, the V2 name is used, so that no group reads another's messages. Messages that a group already has in its V1
topic are still read from there.
"""

from collections.abc import Callable, Collection, Container
from typing import NamedTuple

from neve.remoting.names import RETRY_PREFIX, RETRY_V1, RETRY_V2, real_topic

_V1, _V2 = "_", "+"


class Owner(NamedTuple):
    """Owner of a retry topic: a group, with the topic from which it popped; without a topic for messages sent back."""

    group: str
    topic: str | None = None


class RetryNames:
    """Parses and creates names of retry topics (RocketMQ's KeyBuilder), based on the existing topics and groups."""

    def __init__(
        self,
        topics: Container[str],
        groups: Container[str],
        has_offsets: Callable[[str, str], bool],
        prefers_v2: Callable[[], bool],
    ) -> None:
        """Create it; `has_offsets` returns whether the group has a committed offset in the topic."""
        self._topics, self._groups, self._has_offsets, self._prefers_v2 = topics, groups, has_offsets, prefers_v2

    def owners(self, name: str) -> list[Owner]:
        """Return all meanings of a retry topic's name on this broker; none if no table contains its parts."""
        rest = name.removeprefix(RETRY_PREFIX)
        group, plus, topic = rest.partition(_V2)
        if plus:
            return [Owner(group, topic)]
        owners = [Owner(rest)] if rest in self._groups else []
        splits = (at for at, letter in enumerate(rest) if letter == _V1)
        pairs = (Owner(rest[:at], rest[at + 1 :]) for at in splits)
        return owners + [pair for pair in pairs if pair.group in self._groups and pair.topic in self._topics]

    def group_of(self, name: str) -> str:
        """Return the group whose settings apply to the messages of a retry topic."""
        owners = self.owners(name)
        return owners[0].group if owners else name.removeprefix(RETRY_PREFIX)

    def of_pair(self, group: str, topic: str) -> str:
        """Return the topic for redeliveries of messages that a group popped from a topic; a retry topic is its own."""
        if topic.startswith(RETRY_PREFIX):
            return topic
        v1 = real_topic(topic, group, RETRY_V1)
        if self._prefers_v2() or not self._is_alone(v1, group, topic):
            return real_topic(topic, group, RETRY_V2)
        return v1

    def to_read(self, group: str, topic: str) -> list[str]:
        """Return the existing retry topics with messages that the group popped from the topic."""
        if topic.startswith(RETRY_PREFIX):
            return []
        v1, v2 = (real_topic(topic, group, version) for version in (RETRY_V1, RETRY_V2))
        found = [v2] if v2 in self._topics else []
        if v1 in self._topics and (self._is_alone(v1, group, topic) or self._has_offsets(group, v1)):
            found.append(v1)
        return found

    def unread_by(self, name: str, topics_of: Callable[[str], Collection[str]]) -> list[str]:
        """Return the groups that read a retry topic and have no committed offset in it yet.

        This inverts `to_read` and includes the group's own retry topic. `topics_of` returns the topics in which a group
        has committed offsets.
        """
        rest = name.removeprefix(RETRY_PREFIX)
        own = [rest] if topics_of(rest) else []
        found = own + [group for group, topic in self._pairs_of(name) if not topic.startswith(RETRY_PREFIX)]
        return [group for group in dict.fromkeys(found) if not self._has_offsets(group, name)]

    def _pairs_of(self, name: str) -> list[tuple[str, str]]:
        """Return the pairs whose retries are in a retry topic.

        Such a group has a committed offset in the original topic, and the name denotes no other pair.
        """
        rest = name.removeprefix(RETRY_PREFIX)
        group, plus, topic = rest.partition(_V2)
        if plus:
            return [(group, topic)] if self._has_offsets(group, topic) else []
        splits = [(rest[:at], rest[at + 1 :]) for at, letter in enumerate(rest) if letter == _V1]
        return [pair for pair in splits if self._has_offsets(*pair) and self._is_alone(name, *pair)]

    def deleted_with(self, group: str, topic: str) -> list[str]:
        """Return the retry topics that denote only this pair; they are deleted with the topic."""
        names = (real_topic(topic, group, version) for version in (RETRY_V1, RETRY_V2))
        found = [name for name in names if name in self._topics and self._is_alone(name, group, topic)]
        return [name for name in found if self._has_offsets(group, topic) or self._has_offsets(group, name)]

    def _is_alone(self, name: str, group: str, topic: str) -> bool:
        return all(owner == (group, topic) for owner in self.owners(name))
