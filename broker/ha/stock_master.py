"""What a plain Apache master says of itself by Remoting, and whether its log can be followed. Pure.

request  says
26       its configuration, as properties: what has to be equal before a byte of its log goes over
28       {"table":{…}}: when it was started (bootTimestamp), where its log begins and ends
906      where its HA port is, and where its log ended when it was started: masterFlushOffset, whatever its name says
907      where its log ends, and which slaves are in sync with how much of it

28 also says how much is not flushed yet (remainHowManyDataToFlush), rounded for the eye: `12.3 KiB`, or `12,3` as the
master's country has it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import msgspec

from broker.ha.frames import Hello, Refusal
from broker.ha.greeting import Reason, refusal
from broker.ha.stock_reach import Look
from neve.errors import NeveError


class Life(msgspec.Struct, frozen=True, rename="camel"):
    """One life of one master: in another one its log may be another from some place on."""

    cluster: str
    broker: str
    boot_ms: int
    end_at_start: int


class StockMaster(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    life: Life
    begin: int
    end: int
    ha_address: str
    settings: Mapping[str, str]

    @property
    def end_at_start(self) -> int:
        return self.life.end_at_start


class _Runtime(msgspec.Struct):
    table: dict[str, str]


def read_settings(properties: str) -> dict[str, str]:
    """Key → value, of a configuration."""
    pairs = (line.partition("=") for line in properties.splitlines())
    return {name.strip(): value.strip() for name, separator, value in pairs if separator}


def read_stock_master(properties: str, runtime: bytes, ha_info: Mapping[str, str]) -> StockMaster:
    """Out of the three answers. Raises NeveError where one lacks what is needed."""
    settings = read_settings(properties)
    try:
        table = msgspec.json.decode(runtime, type=_Runtime).table
        life = Life(
            settings["brokerClusterName"],
            settings["brokerName"],
            int(table["bootTimestamp"]),
            int(ha_info["masterFlushOffset"]),
        )
        begin, end = max(int(table["commitLogMinOffset"]), 0), int(table["commitLogMaxOffset"])  # -1: an empty log's
        ha_address = ha_info["masterHaAddress"]
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise NeveError(None, f"the master does not say of itself what a slave has to know: {error!r}") from error
    if not (0 <= begin <= end and life.end_at_start <= end):
        raise NeveError(None, f"a log from {begin} to {end} that ended at {life.end_at_start} once can't be")
    return StockMaster(life=life, begin=begin, end=end, ha_address=ha_address, settings=settings)


# What makes a log of another kind, where it is on.
_OTHER_LOGS = ("enableDLegerCommitLog", "enableLmq", "enableMultiDispatch", "forceVerifyPropCRC")


def unlike_stock(own: Hello, master: StockMaster) -> Refusal | None:
    """Why its log can't be followed; None: it can."""
    theirs = master.settings
    if theirs.get("brokerRole") == "SLAVE" or theirs.get("brokerId", "0") != "0":
        return refusal(Reason.NOT_MASTER, f"brokerId {theirs.get('brokerId')}, {theirs.get('brokerRole')}: no master")
    if theirs.get("enableControllerMode") == "true":
        return refusal(Reason.NOT_MASTER, "the master has a controller: so has who follows it")
    return unlike_settings(own, theirs)


def unlike_stock_member(own: Hello, settings: Mapping[str, str], *, waits: bool) -> Refusal | None:
    """The same of a master that a controller has elected. `waits`: here nothing is confirmed that a slave lacks."""
    if settings.get("brokerRole") == "SLAVE" or settings.get("brokerId", "0") != "0":
        return refusal(Reason.NOT_MASTER, "it does not know yet that it is master")
    if waits and settings.get("allAckInSyncStateSet") != "true":
        return refusal(Reason.FORMAT, "allAckInSyncStateSet=false at the master: what it confirms others may lack")
    if settings.get("timerWheelEnable") != "false":
        return refusal(Reason.FORMAT, "timerWheelEnable=true at the master: which it has delivered nobody else knows")
    return unlike_settings(own, settings)


def unlike_settings(own: Hello, theirs: Mapping[str, str]) -> Refusal | None:
    """What has to be equal, and what makes its log one of another kind."""
    equal = {
        "brokerClusterName": (own.cluster, Reason.CLUSTER),
        "brokerName": (own.broker_set, Reason.BROKER_SET),
        "mappedFileSizeCommitLog": (str(own.mapped_file_size_commit_log), Reason.FILE_SIZE),
        "messageDelayLevel": (own.message_delay_level, Reason.DELAY_LEVELS),
    }
    for name, (here, reason) in equal.items():
        if theirs.get(name) != here:
            return refusal(reason, f"{name}: {theirs.get(name)!r} at the master, {here!r} here")
    odd = [f"{name}=true" for name in _OTHER_LOGS if theirs.get(name) == "true"]
    if odd:
        return refusal(Reason.FORMAT, f"{', '.join(odd)} at the master: a log that neve does not follow")
    return None


# ---- how safe its log is


class _Slave(msgspec.Struct, rename="camel"):
    slave_ack_offset: int
    in_sync: bool


class _HaStatus(msgspec.Struct, rename="camel"):
    master: bool
    master_commit_log_max_offset: int
    ha_connection_info: list[_Slave] = []


_SIZE = re.compile(r"(\d+(?:[.,]\d)?) ([KMGTPE]?)i?B")
_UNITS = ("", "K", "M", "G", "T", "P", "E")
_ROUNDED = 0.1  # of the unit, at the most


def read_look(before: bytes, ha_status: bytes, after: bytes, boot_ms: int) -> Look | None:
    """Out of 28, 907 and 28 again, asked in this order; None: they are not all of the life that began at `boot_ms`, or
    not of a master with slaves.

    What was not flushed when 28 was answered last is more than what of 907's end was not. Raises NeveError.
    """
    try:
        tables = [msgspec.json.decode(answer, type=_Runtime).table for answer in (before, after)]
        status = msgspec.json.decode(ha_status, type=_HaStatus)
        if any(int(table["bootTimestamp"]) != boot_ms for table in tables):
            return None
        if not (status.master and status.ha_connection_info):
            return None
        begin, end = max(int(tables[1]["commitLogMinOffset"]), 0), status.master_commit_log_max_offset
        behind = _at_most(tables[1]["remainHowManyDataToFlush"])
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise NeveError(None, f"the master does not say how safe its log is: {error!r}") from error
    slaves = tuple(slave.slave_ack_offset for slave in status.ha_connection_info if slave.in_sync)
    return Look(begin=begin, end=end, flushed=max(end - behind, 0), in_sync=slaves)


def _at_most(text: str) -> int:
    """The most bytes that are written so. Raises ValueError."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no size")
    number, unit = found.groups()
    if not unit:
        return int(number)
    return math.ceil((float(number.replace(",", ".")) + _ROUNDED) * (1 << 10 * _UNITS.index(unit)))
