"""Pulls that found nothing wait here: answered by the next message with a fitting tag, or when their time is up."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from infra.clock import Clock
from infra.remoting_server import Connection
from infra.supervisor import Faults


@dataclass(slots=True, eq=False)
class HeldPull:
    connection: Connection
    topic: str
    queue_id: int
    offset: int
    deadline: float
    codes: frozenset[int] | None
    # Runs the pull again and answers it, a failure too; True as its argument: answer whatever comes.
    resume: Callable[[bool], None]
    done: bool = False


class PullRequestHold:
    """One wake-up for each pull, whoever comes first: message, deadline, or the connection's end."""

    def __init__(self, clock: Clock, limit: int, faults: Faults) -> None:
        self._clock, self._limit, self._faults = clock, limit, faults
        self._held: defaultdict[tuple[str, int], list[HeldPull]] = defaultdict(list)
        self._ready: list[HeldPull] = []
        self.count = 0
        self.wake_scheduled = False

    @property
    def full(self) -> bool:
        return self.count >= self._limit

    def hold(self, pull: HeldPull) -> None:
        self._held[pull.topic, pull.queue_id].append(pull)
        self.count += 1

    def arrived(self, topic: str, queue_id: int, queue_offset: int, tag_code: int) -> bool:
        """A message is visible; True if somebody waits for it. The pulls run at `wake`, after the whole batch."""
        waiting = self._held.get((topic, queue_id))
        if not waiting:
            return False
        rest = []
        for pull in waiting:
            if pull.codes is None or tag_code in pull.codes or queue_offset < pull.offset:
                self._ready.append(pull)
                self.count -= 1
            else:
                rest.append(pull)
        self._keep((topic, queue_id), rest)
        return bool(self._ready)

    def wake(self) -> None:
        self.wake_scheduled = False
        ready, self._ready = self._ready, []
        for pull in ready:
            self._resume(pull, False)

    def check_deadlines(self) -> None:
        now = self._clock.monotonic()
        for key, waiting in list(self._held.items()):
            due = [pull for pull in waiting if pull.deadline <= now]
            if due:
                self.count -= len(due)
                self._keep(key, [pull for pull in waiting if pull.deadline > now])
                for pull in due:
                    self._resume(pull, True)

    def connection_closed(self, connection: Connection) -> None:
        self._drop(lambda pull: pull.connection is connection)

    def release_topic(self, topic: str) -> None:
        """The topic is gone or its range moved: everybody asks again and hears the new state."""
        for key in [key for key in self._held if key[0] == topic]:
            waiting = self._held.pop(key)
            self.count -= len(waiting)
            for pull in waiting:
                self._resume(pull, True)

    def release_all(self) -> None:
        for topic in {topic for topic, _ in self._held}:
            self.release_topic(topic)

    def _drop(self, matches: Callable[[HeldPull], bool]) -> None:
        for key, waiting in list(self._held.items()):
            rest = [pull for pull in waiting if not matches(pull)]
            self.count -= len(waiting) - len(rest)
            self._keep(key, rest)

    def _keep(self, key: tuple[str, int], rest: list[HeldPull]) -> None:
        if rest:
            self._held[key] = rest
        else:
            self._held.pop(key, None)

    def _resume(self, pull: HeldPull, last: bool) -> None:
        if pull.done:
            return
        pull.done = True
        try:
            pull.resume(last)
        except Exception as error:  # noqa: BLE001 - one pull; the others that are due have their turn
            self._faults.add("a waiting pull", error, f"of {pull.topic}, queue {pull.queue_id}")
