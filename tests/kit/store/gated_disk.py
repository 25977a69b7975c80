"""A disk on which a test holds or fails the atomic writes."""

from __future__ import annotations

import threading
from pathlib import Path

from infra.disk.filesystem import RealDisk


class GatedDisk(RealDisk):
    """Atomic writes wait until `go` is set, and raise `fault` if it is not None.

    `only` is the name of the files that this applies to; an empty name means all files.
    """

    def __init__(self, only: str = "", *, is_open: bool = True) -> None:
        self._only = only
        self.go, self.began = threading.Event(), threading.Event()
        if is_open:
            self.go.set()
        self.fault: OSError | None = None
        self.pending = self.writes = self.on_loop = 0
        self.overlapped = False

    def write_atomic(self, path: Path, data: bytes) -> None:
        if self._only not in {"", path.name}:
            super().write_atomic(path, data)
            return
        self.on_loop += threading.current_thread() is threading.main_thread()
        self.writes += 1
        self.pending += 1
        self.overlapped |= self.pending > 1
        self.began.set()
        try:
            assert self.go.wait(20)
            if self.fault is not None:
                raise self.fault
            super().write_atomic(path, data)
        finally:
            self.pending -= 1
