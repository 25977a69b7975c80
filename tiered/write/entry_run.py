"""Runs of ConsumeQueue entries: the places of consecutive records of one queue in the local log."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class EntryRun(Protocol):
    """Consecutive ConsumeQueue entries of one queue, as returned by the store's `entries`."""

    @property
    def first_offset(self) -> int: ...

    @property
    def physical(self) -> npt.NDArray[np.int64]: ...

    @property
    def sizes(self) -> npt.NDArray[np.int32]: ...


class PartOfRun(NamedTuple):
    """A part of a run: the entries of one name, or those that a worker received."""

    first_offset: int
    physical: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int32]
