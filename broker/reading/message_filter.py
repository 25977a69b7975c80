"""Filters of subscriptions: all messages, tag hashes, or an SQL92 expression over the properties.

Tag hashes are compared with the entries of the consume queue (`broker/store/reading`, `tiered/read/cold_reader`). An
expression needs the records: `record_filter` evaluates it for those of one read, up to the limits below.
"""

from dataclasses import dataclass

from broker.reading.sql92 import SqlError, SqlFilter, compile_sql
from neve.errors import BrokerError
from neve.record.properties import tags_code
from neve.remoting.codes import ResponseCode

# Limits on the records of one read that an expression is evaluated for, because this runs on the event loop. Large
# expressions get fewer.
LOOKED_AT_COUNT = 256
LOOKED_AT_BYTES = 1 << 20
FULL_COUNT_NODES = 256


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """A set of tag hashes, a predicate over the properties, or neither, which selects all messages."""

    codes: frozenset[int] | None = None
    predicate: SqlFilter | None = None

    def __post_init__(self) -> None:
        assert self.codes is None or self.predicate is None, "a subscription is of one type"


def limits_of(predicate: SqlFilter) -> tuple[int, int]:
    """Return how many records and bytes one read evaluates the predicate for."""
    share = max(1, predicate.nodes // FULL_COUNT_NODES)
    return LOOKED_AT_COUNT // share, LOOKED_AT_BYTES // share


EVERY_MESSAGE = MessageFilter()


def parse_expression(expression: str | None, kind: str | None, *, sql: bool) -> MessageFilter:
    """Return the filter for `a || b` or for an SQL92 expression.

    `sql` states whether the broker supports SQL92. Raises BrokerError if the expression is invalid or not supported.
    """
    if kind == "SQL92":
        if not sql:
            raise BrokerError(
                ResponseCode.SYSTEM_ERROR, "The broker does not support consumer to filter message by SQL92"
            )
        try:
            return MessageFilter(predicate=compile_sql(expression or ""))
        except SqlError as error:
            raise BrokerError(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"parse the consumer's subscription failed: {error}"
            ) from error
    if kind not in (None, "", "TAG"):
        raise BrokerError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"ExpressionType={kind} is not known")
    if not expression or expression.strip() == "*":
        return EVERY_MESSAGE
    tags = [part.strip() for part in expression.split("||") if part.strip()]
    if not tags:
        raise BrokerError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, "parse the consumer's subscription failed")
    return MessageFilter(frozenset(map(tags_code, tags)))
