"""What a journal refuses, and why."""

from __future__ import annotations

from infra.objects.store import StoreUnavailable


class Fenced(Exception):
    """Another process owns this archive now: no more archiving, deleting or unlinking here."""


class NotMaster(Fenced):
    """This member of a broker set follows the archive of its master: it appends nothing."""


class ArchiveRefused(Exception):
    """The archive in this place is not this broker's; the message says what to do."""


class WouldLoseRows(Exception):
    """An entry after which rows that are in view would be nowhere: a mistake of ours, and it is not written."""


class NotAttached(StoreUnavailable):
    """The store has not answered since the start, so this process has no EPOCH yet."""
