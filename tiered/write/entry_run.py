"""What the local log says of one queue: where its records lie, one behind another without a hole."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class EntryRun(Protocol):
    """Consecutive ConsumeQueue entries of one queue, as the store's `entries` gives them."""

    @property
    def first_offset(self) -> int: ...

    @property
    def physical(self) -> npt.NDArray[np.int64]: ...

    @property
    def sizes(self) -> npt.NDArray[np.int32]: ...


class PartOfRun(NamedTuple):
    """Some of them: those that a name holds, or that a worker was given."""

    first_offset: int
    physical: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int32]
