"""A bucket that becomes unreachable, answers late, loses answers and reports another time.

It detects forbidden writes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from infra.clock import ManualClock
from infra.objects.store import AccessDenied, Pace, PutOutcome, StoreUnavailable, UnknownOutcome, unpaced
from tests.kit.store.memory_store import MemoryStore

URL = "sim:"


class FaultyStore(MemoryStore):
    """An object store with faults; `calls` run before each request and may act as another thread or process."""

    def __init__(self, clock: ManualClock, seed: int) -> None:
        super().__init__(clock)
        self.url = URL
        self.down = False
        self.failing = 0.0  # Share of the requests that fail, before or after their effect.
        self.expired = False  # Requests fail with credential errors until these are renewed.
        self.conflicting = 0.0  # Share of the conditional PUTs that are answered with 409.
        self.before_call: Callable[[str, str], None] = lambda verb, key: None
        self.deleting: Callable[[str], None] = lambda key: None
        self._random = random.Random(seed)

    def _strike(self, verb: str, key: str, *, after: bool) -> None:
        super()._strike(verb, key, after=after)
        if self.down and not after:
            raise StoreUnavailable(f"{verb} {key}: the store is down")
        if self.expired and not after:
            refusal = AccessDenied(f"{verb} {key}: 403 ExpiredToken")
            refusal.of_credentials = True
            raise refusal
        if ".probe-" in key:
            return  # If threads raced here, the faults would not follow from the seed.
        if not after:
            self.before_call(verb, key)
        if self.failing and self._random.random() < self.failing:
            if verb in {"put", "delete"} and (after or self._random.random() < 0.5):
                raise UnknownOutcome(f"{verb} {key}: no answer, {'done' if after else 'not done'}")
            if not after:
                raise StoreUnavailable(f"{verb} {key}: 503")
        if verb == "delete" and not after:
            self.deleting(key)

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False, pace: Pace = unpaced) -> PutOutcome:
        raced = ".probe-" in key  # In threads the faults would not follow from the seed.
        if if_absent and self.conflicting and not raced and self._random.random() < self.conflicting:
            raise UnknownOutcome(f"put {key}: 409 ConditionalRequestConflict")
        return super().put(key, data, if_absent=if_absent, pace=pace)

    @property
    def is_faulty(self) -> bool:
        return self.down or self.expired or self.failing > 0 or self.conflicting > 0

    def heal(self) -> None:
        self.down, self.failing = False, 0.0
        self.expired, self.conflicting = False, 0.0
