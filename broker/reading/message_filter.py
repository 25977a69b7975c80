"""What a subscription selects: everything, the hashes of its tags, or what an SQL92 expression says of the properties.

Tags are asked of the queue's entries (`broker/store/reading`, `tiered/read/cold_reader`); an expression needs the
records: those of one read are looked through (`record_filter`), and no more of them than the limits here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from broker.reading.sql92 import SqlError, compile_sql
from neve.errors import BrokerError
from neve.record.properties import tags_code
from neve.remoting.codes import ResponseCode

# Records that one read looks at for an expression: it runs on the loop, and others wait.
LOOKED_AT_COUNT = 256
LOOKED_AT_BYTES = 1 << 20

Predicate = Callable[[Mapping[str, str]], bool]


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """By the hash of the tag, by a predicate over the properties, or neither: all."""

    codes: frozenset[int] | None = None
    predicate: Predicate | None = None

    def __post_init__(self) -> None:
        assert self.codes is None or self.predicate is None, "a subscription is of one type"


EVERY_MESSAGE = MessageFilter()


def parse_expression(expression: str | None, kind: str | None, *, sql: bool) -> MessageFilter:
    """What `a || b` or an SQL92 expression selects; `sql`: the broker takes the latter. Raises BrokerError."""
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
