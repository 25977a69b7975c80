"""An object store in a dictionary, with injectable faults."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.clock import Clock, SystemClock
from infra.objects.store import (
    NotFound,
    ObjectInfo,
    Pace,
    PreconditionFailed,
    PutOutcome,
    check_key,
    check_prefix,
    unpaced,
)


@dataclass(slots=True)
class StoreFault:
    """Fails the nth matching call, before or after its effect."""

    verb: str
    error: BaseException  # An exception outside Exception: the process ends there.
    after: bool = False
    match: str = ""
    skip: int = 0
    times: int = 1


class MemoryStore:
    """A store in a dictionary. `fail()` injects faults, `on_call` lets a test act between two calls."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.url = "s3://memory"
        self.requests: Counter[str] = Counter()
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.faults: list[StoreFault] = []
        self.on_call: Callable[[str, str], None] | None = None
        self.clock_offset_ms = 0
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()

    def fail(
        self, verb: str, error: BaseException, *, after: bool = False, match: str = "", skip: int = 0, times: int = 1
    ) -> None:
        self.faults.append(StoreFault(verb, error, after, match, skip, times))

    @contextmanager
    def looked_at(self, look: Callable[[], object]) -> Iterator[list[str]]:
        """Run a callback before each call except its own; yield the verbs of the calls."""
        looks: list[str] = []

        def on_call(verb: str, key: str) -> None:
            self.on_call = None
            try:
                look()
                looks.append(verb)
            finally:
                self.on_call = on_call

        self.on_call = on_call
        try:
            yield looks
        finally:
            self.on_call = None

    def before_first(self, verb: str, act: Callable[[str], object], *, match: str = "") -> None:
        """Call `act` with the key of the first matching call, and reset `on_call`."""

        def on_call(called: str, key: str) -> None:
            if called == verb and match in key:
                self.on_call = None
                act(key)

        self.on_call = on_call

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False, pace: Pace = unpaced) -> PutOutcome:
        check_key(key)
        content = data.read_bytes() if isinstance(data, Path) else bytes(data)
        pace(len(content))
        self._enter("put", key)
        with self._lock:
            if if_absent and key in self.objects:
                raise PreconditionFailed(key)
            self.objects[key] = (content, self._clock.now_ms() + self.clock_offset_ms)
        self._leave("put", key)
        return PutOutcome(_etag(content))

    def get(self, key: str) -> bytes:
        self._enter("get", key)
        content = self._find(key)[0]
        self._leave("get", key)
        return content

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._enter("get_range", key)
        content = self._find(key)[0][start : start + length]
        self._leave("get_range", key)
        return content

    def head(self, key: str) -> ObjectInfo:
        self._enter("head", key)
        content, modified = self._find(key)
        self._leave("head", key)
        return ObjectInfo(key, len(content), _etag(content), modified)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        self._enter("list", prefix)
        with self._lock:
            found = sorted((key, value) for key, value in self.objects.items() if key.startswith(prefix))
        for key, (content, modified) in found:
            yield ObjectInfo(key, len(content), _etag(content), modified)

    def list_prefixes(self, prefix: str) -> Sequence[str]:
        check_prefix(prefix)
        self._enter("list_prefixes", prefix)
        with self._lock:
            tails = [key[len(prefix) :] for key in self.objects if key.startswith(prefix)]
        return sorted({f"{prefix}{tail.split('/', 1)[0]}/" for tail in tails if "/" in tail})

    def delete(self, key: str) -> None:
        check_key(key)
        self._enter("delete", key)
        with self._lock:
            self.objects.pop(key, None)
        self._leave("delete", key)

    def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.delete(key)

    def now_ms(self) -> int | None:
        self._enter("now_ms", "")
        return self._clock.now_ms() + self.clock_offset_ms

    def remove_stale_uploads(self, ours: Callable[[str], bool]) -> int:
        return 0

    def _find(self, key: str) -> tuple[bytes, int]:
        with self._lock:
            if key not in self.objects:
                raise NotFound(key)
            return self.objects[key]

    def _enter(self, verb: str, key: str) -> None:
        self.requests[verb] += 1
        if self.on_call is not None:
            self.on_call(verb, key)
        self._strike(verb, key, after=False)

    def _leave(self, verb: str, key: str) -> None:
        self._strike(verb, key, after=True)

    def _strike(self, verb: str, key: str, *, after: bool) -> None:
        for fault in self.faults:
            if fault.after != after or fault.verb not in {verb, "*"} or fault.match not in key or not fault.times:
                continue
            if fault.skip:
                fault.skip -= 1
                continue
            fault.times -= 1
            raise fault.error


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
