"""Errors of the local store."""

from __future__ import annotations


class StoreError(Exception):
    """Base class of the local store's errors."""


class StoreFull(StoreError):
    """No disk space for the next file; reads still work."""


class StoreNotWritable(StoreError):
    """The store accepts no messages: it is not loaded, it is shut down, or a sync failed."""


class TruncationRunning(StoreNotWritable):
    """A truncation of the diverged tail is in progress; until it is done the store rejects all changes."""


class MessageIllegal(StoreError):
    """The message cannot be stored in this form."""


class InternalTopic(MessageIllegal):
    """Only the broker's own modules may write to this topic."""


class NotThisTurn(StoreError):
    """The budget of queue files for this turn of the event loop is spent; retry in the next turn."""


class StoreCorrupt(StoreError):
    """The content of the directory is inconsistent, or was written by a newer version."""


class StoreLocked(StoreError):
    """Another broker uses the data directory."""


class LogMismatch(StoreError):
    """Bytes from a master do not continue the log of its slave."""


class TruncationRefused(StoreError):
    """Confirmed records are not truncated unless an operator orders it."""
