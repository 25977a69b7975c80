"""What the store refuses, and why."""

from __future__ import annotations


class StoreError(Exception):
    """Any refusal or failure of the local store."""


class StoreFull(StoreError):
    """No room on the disk for the next file; reads go on."""


class StoreNotWritable(StoreError):
    """The store takes no more messages: it is not loaded, shut down, or a sync failed."""


class LogIsCut(StoreNotWritable):
    """The diverged tail of the log is being cut off: until that is done the store changes nothing."""


class MessageIllegal(StoreError):
    """The message can't be stored as it is."""


class InternalTopic(MessageIllegal):
    """Only the broker's own modules may write to this topic."""


class NotThisTurn(StoreError):
    """Enough files were made ready in this turn of the loop: the same again in the next one goes on."""


class StoreCorrupt(StoreError):
    """The directory's content contradicts itself, or comes from a newer version."""


class StoreLocked(StoreError):
    """Another broker uses the data directory."""


class LogMismatch(StoreError):
    """What a master sent does not continue the log of its slave."""


class TruncationRefused(StoreError):
    """What is confirmed is not cut, but by an operator."""
