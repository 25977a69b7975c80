"""Errors of a journal."""

from __future__ import annotations

from infra.objects.store import StoreUnavailable


class Fenced(Exception):
    """Another process owns the archive now; this one must not archive, delete or evict."""


class NotMaster(Fenced):
    """This member of a broker set is not the master, so it does not append to the archive."""


class ArchiveRefused(Exception):
    """The archive in this store is not this broker's; the message contains the remedy."""


class WouldLoseRows(Exception):
    """The entry would lose rows in view; this is a defect of the program, and the entry is not written."""


class NotAttached(StoreUnavailable):
    """The store has not answered since the start, so this process has no EPOCH yet."""
