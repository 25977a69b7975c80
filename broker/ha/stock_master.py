"""Properties of a plain Apache master, queried by Remoting, and whether its log can be followed. Pure.

request  returns
26       its configuration, as properties; some settings have to match before bytes of its log are sent
28       {"table":{…}}: when it was started (bootTimestamp), start and end of its log
906      its HA address, and the end of its log when it was started: masterFlushOffset, despite the name
907      the end of its log; of each slave, whether it is in sync, and the end of its log

28 also has the size of unflushed data (remainHowManyDataToFlush), rounded for display: `12.3 KiB`, or `12,3` with some
locales of the master.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import msgspec

from broker.ha.frames import Hello, StreamRefusal
from broker.ha.greeting import Reason, refusal
from broker.ha.stock_archivable_limit import Observation
from neve.errors import NeveError


class MasterLife(msgspec.Struct, frozen=True, rename="camel"):
    """One life of a master. In another life, its log may differ from some offset on."""

    cluster: str
    broker: str
    boot_ms: int
    end_at_start: int


class StockMaster(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of an Apache master."""

    life: MasterLife
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
    """Parse properties to a dict."""
    pairs = (line.partition("=") for line in properties.splitlines())
    return {name.strip(): value.strip() for name, separator, value in pairs if separator}


def read_stock_master(properties: str, runtime: bytes, ha_info: Mapping[str, str]) -> StockMaster:
    """Return the properties from three answers. Raise NeveError if one lacks a field."""
    settings = read_settings(properties)
    try:
        table = msgspec.json.decode(runtime, type=_Runtime).table
        life = MasterLife(
            settings["brokerClusterName"],
            settings["brokerName"],
            int(table["bootTimestamp"]),
            int(ha_info["masterFlushOffset"]),
        )
        begin, end = max(int(table["commitLogMinOffset"]), 0), int(table["commitLogMaxOffset"])  # an empty log has -1
        ha_address = ha_info["masterHaAddress"]
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise NeveError(None, f"the master does not report the fields that a slave needs: {error!r}") from error
    if not (0 <= begin <= end and life.end_at_start <= end):
        raise NeveError(
            None,
            f"the master reports an impossible log: {begin} to {end}, at its start it ended at {life.end_at_start}",
        )
    return StockMaster(life=life, begin=begin, end=end, ha_address=ha_address, settings=settings)


# Settings that change the format of the log.
_OTHER_LOGS = ("enableDLegerCommitLog", "enableLmq", "enableMultiDispatch", "forceVerifyPropCRC")


def unlike_stock(own: Hello, master: StockMaster) -> StreamRefusal | None:
    """Return why the log of this master can't be followed; None: it can."""
    theirs = master.settings
    if theirs.get("brokerRole") == "SLAVE" or theirs.get("brokerId", "0") != "0":
        return refusal(Reason.NOT_MASTER, f"brokerId {theirs.get('brokerId')}, {theirs.get('brokerRole')}: no master")
    if theirs.get("enableControllerMode") == "true":
        return refusal(Reason.NOT_MASTER, "the master has a controller: its slaves need one, too")
    return unlike_settings(own, theirs)


def unlike_stock_member(own: Hello, settings: Mapping[str, str], *, waits: bool) -> StreamRefusal | None:
    """Return why the log of a master that a controller has elected can't be followed; None: it can.

    `waits`: acknowledgements of this set wait for slaves, so bytes that a slave lacks must not be confirmed.
    """
    if settings.get("brokerRole") == "SLAVE" or settings.get("brokerId", "0") != "0":
        return refusal(Reason.NOT_MASTER, "it is not the master yet")
    if waits and settings.get("allAckInSyncStateSet") != "true":
        return refusal(
            Reason.FORMAT, "allAckInSyncStateSet=false at the master: in-sync members may lack confirmed messages"
        )
    if settings.get("timerWheelEnable") != "false":
        return refusal(
            Reason.FORMAT, "timerWheelEnable=true at the master: only the master knows which timers it has delivered"
        )
    return unlike_settings(own, settings)


def unlike_settings(own: Hello, theirs: Mapping[str, str]) -> StreamRefusal | None:
    """Return why two brokers' settings don't match; None: they do."""
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


# -- state of its log


class _Slave(msgspec.Struct, rename="camel"):
    slave_ack_offset: int
    in_sync: bool


class _HaStatus(msgspec.Struct, rename="camel"):
    master: bool
    master_commit_log_max_offset: int
    ha_connection_info: list[_Slave] = []


_SIZE = re.compile(r"(\d+(?:[.,]\d)?) ([KMGTPE]?)i?B")
_UNITS = ("", "K", "M", "G", "T", "P", "E")
_ROUNDED = 0.1  # the largest error of rounding, in units


def read_observation(before: bytes, ha_status: bytes, after: bytes, boot_ms: int) -> Observation | None:
    """Return the state of a log from the answers to 28, 907 and 28, queried in this order.

    None: the answers are not all of the life that began at `boot_ms`, or not of a master with slaves. The unflushed
    size of the second 28 is an upper bound for the unflushed part below the end in 907. Raise NeveError.
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
        raise NeveError(None, f"the master does not report its flushed offset: {error!r}") from error
    slaves = tuple(slave.slave_ack_offset for slave in status.ha_connection_info if slave.in_sync)
    return Observation(begin=begin, end=end, flushed=max(end - behind, 0), in_sync=slaves)


def _at_most(text: str) -> int:
    """Return the largest number of bytes that is displayed as `text`. Raise ValueError."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a size")
    number, unit = found.groups()
    if not unit:
        return int(number)
    return math.ceil((float(number.replace(",", ".")) + _ROUNDED) * (1 << 10 * _UNITS.index(unit)))
