"""Where a group's retries lie, and what the name of such a topic means.

    %RETRY%group          what members sent back, under the name that all clients know
    %RETRY%group_topic    popped from the topic and not acknowledged in time (V1)
    %RETRY%group+topic    the same (V2, `enableRetryTopicV2`); neither a group's nor a topic's name has a +

A V1 name with more than one underscore, or one that is a group's own, may mean several things: %RETRY%a_b is what group
a_b sent back, or what group a popped from b. Which of these there are, the tables of topics and groups say. Where more
than one is possible, a pair's retries get the V2 name, so that no group reads what is another's; what a group has in
its V1 topic from before, it still gets from there.
"""

from collections.abc import Callable, Collection, Container
from typing import NamedTuple

from neve.remoting.names import RETRY_PREFIX, RETRY_V1, RETRY_V2, real_topic

_V1, _V2 = "_", "+"


class Owner(NamedTuple):
    """Whose a retry topic is: the group's own, or of what it popped from a topic."""

    group: str
    topic: str | None = None


class RetryNames:
    """Reads and makes the names of retry topics (RocketMQ's KeyBuilder), by the topics and groups that there are."""

    def __init__(
        self,
        topics: Container[str],
        groups: Container[str],
        stands: Callable[[str, str], bool],
        prefers_v2: Callable[[], bool],
    ) -> None:
        """`stands(group, topic)`: the group has a position there."""
        self._topics, self._groups, self._stands, self._prefers_v2 = topics, groups, stands, prefers_v2

    def owners(self, name: str) -> list[Owner]:
        """Everything that the name of a retry topic can mean here; nothing if no table knows it."""
        rest = name.removeprefix(RETRY_PREFIX)
        group, plus, topic = rest.partition(_V2)
        if plus:
            return [Owner(group, topic)]
        owners = [Owner(rest)] if rest in self._groups else []
        cuts = (at for at, letter in enumerate(rest) if letter == _V1)
        pairs = (Owner(rest[:at], rest[at + 1 :]) for at in cuts)
        return owners + [pair for pair in pairs if pair.group in self._groups and pair.topic in self._topics]

    def group_of(self, name: str) -> str:
        """Whose settings hold for the messages of a retry topic."""
        owners = self.owners(name)
        return owners[0].group if owners else name.removeprefix(RETRY_PREFIX)

    def of_pair(self, group: str, topic: str) -> str:
        """Where goes what the group popped from the topic; out of a retry topic it goes there again."""
        if topic.startswith(RETRY_PREFIX):
            return topic
        v1 = real_topic(topic, group, RETRY_V1)
        if self._prefers_v2() or not self._is_alone(v1, group, topic):
            return real_topic(topic, group, RETRY_V2)
        return v1

    def to_read(self, group: str, topic: str) -> list[str]:
        """Those topics that there are with what the group popped from that one."""
        if topic.startswith(RETRY_PREFIX):
            return []
        v1, v2 = (real_topic(topic, group, version) for version in (RETRY_V1, RETRY_V2))
        found = [v2] if v2 in self._topics else []
        if v1 in self._topics and (self._is_alone(v1, group, topic) or self._stands(group, v1)):
            found.append(v1)
        return found

    def unread_by(self, name: str, topics_of: Callable[[str], Collection[str]]) -> list[str]:
        """Who reads a retry topic and has no position in it yet: `to_read`, and the group's own, asked from its side.

        `topics_of`: where a group has positions.
        """
        rest = name.removeprefix(RETRY_PREFIX)
        own = [rest] if topics_of(rest) else []
        found = own + [group for group, topic in self._pairs_of(name) if not topic.startswith(RETRY_PREFIX)]
        return [group for group in dict.fromkeys(found) if not self._stands(group, name)]

    def _pairs_of(self, name: str) -> list[tuple[str, str]]:
        """Whose retries lie there: a group that has a position in the topic, and no other to be told from it."""
        rest = name.removeprefix(RETRY_PREFIX)
        group, plus, topic = rest.partition(_V2)
        if plus:
            return [(group, topic)] if self._stands(group, topic) else []
        cuts = [(rest[:at], rest[at + 1 :]) for at, letter in enumerate(rest) if letter == _V1]
        return [pair for pair in cuts if self._stands(*pair) and self._is_alone(name, *pair)]

    def gone_with(self, group: str, topic: str) -> list[str]:
        """Those topics that mean nothing else than a pair that there was: they go when the topic goes."""
        names = (real_topic(topic, group, version) for version in (RETRY_V1, RETRY_V2))
        found = [name for name in names if name in self._topics and self._is_alone(name, group, topic)]
        return [name for name in found if self._stands(group, topic) or self._stands(group, name)]

    def _is_alone(self, name: str, group: str, topic: str) -> bool:
        return all(owner == (group, topic) for owner in self.owners(name))
