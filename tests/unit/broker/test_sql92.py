"""SQL92 filters: the selected messages, refused expressions, limits, and the filter over real records.

`tests/interop/test_filters.py` compares them with RocketMQ's own classes.
"""

import pytest

from broker.reading import sql92
from broker.reading.message_filter import limits_of
from broker.reading.record_filter import select
from broker.reading.sql92 import SqlError, compile_sql
from broker.store.reading import GetResult
from neve.record.codec import encode_record
from neve.record.layout import BORN_HOST_V6
from neve.record.properties import properties_to_bytes
from neve.remoting.codes import GetMessageStatus

PROPERTIES = {"n": "5", "price": "2.50", "city": "Oslo", "ok": "true", "bad": "five", "TAGS": "even", "q": "it's"}


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("n = 5", True),
        ("n = 5.0", True),
        ("n <> 5", False),
        ("n != 4", True),
        ("n > 4 AND n >= 5 AND n < 6 AND n <= 5", True),
        ("5 < n", False),
        ("n = '5'", True),
        ("price > 2.4 and price < .26e1", True),
        ("n BETWEEN 3 AND 5", True),
        ("n NOT BETWEEN 3 AND 5", False),
        ("n BETWEEN -3 AND +4", False),
        ("city IN ('Rome', 'Oslo')", True),
        ("city NOT IN ('Rome')", True),
        ("n IN (4, 5)", True),
        ("city IS NULL", False),
        ("nothing IS NULL", True),
        ("city IS NOT NULL", True),
        ("city CONTAINS 'sl'", True),
        ("city STARTSWITH 'Os' AND city ENDSWITH 'lo'", True),
        ("city NOT STARTSWITH 'Os'", False),
        ("q = 'it''s'", True),
        ("ok = TRUE", True),
        # A property alone is false, as in RocketMQ; a property that is missing is unknown.
        ("ok", False),
        ("NOT ok", True),
        ("NOT nothing", False),
        # Every text but "true" is FALSE.
        ("city = FALSE", True),
        ("city <> TRUE", True),
        ("NOT (city = TRUE)", True),
        ("TRUE = ok", True),
        ("nothing = FALSE OR nothing <> TRUE", False),
        # A missing property is unknown only on the left.
        ("5 <> nothing", True),
        ("n <> nothing", True),
        ("nothing = other", True),
        ("nothing CONTAINS 'x' OR nothing NOT CONTAINS 'x'", False),
        ("NOT (nothing CONTAINS 'x')", True),
        ("city CONTAINS '' OR city NOT CONTAINS ''", False),
        ("n BETWEEN low AND 10 OR low IS NULL", True),
        ("n BETWEEN n AND 10", True),
        ("-n < 0 OR -n IS NOT NULL", False),
        ("-n IS NULL", True),
        ("- -5 = n", True),
        ("n /* of the order */ = 5 -- the first", True),
        ("n = 5 -- first\nAND city = 'Rome'", False),
        ("(n = 5) = TRUE", True),
        ("5 IS NULL", False),
        ("NULL", False),
        ("TRUE", True),
        ("FALSE OR TAGS = 'even'", True),
        # AND binds tighter than OR, NOT tighter than both.
        ("n = 5 OR n = 5 AND n = 6", True),
        ("(n = 5 OR n = 5) AND n = 6", False),
        ("NOT n = 6 OR city = 'Rome'", False),
        ("NOT (n = 6) AND city = 'Oslo'", True),
        ("NOT nothing IS NULL", True),
        # Unknown is neither, and only a known side decides.
        ("nothing = 1", False),
        ("NOT nothing = 1", False),
        ("nothing <> 1", False),
        ("nothing = 1 OR n = 5", True),
        ("NOT (nothing = 1 AND n = 6)", True),
        ("bad > 4", False),
        ("NOT (bad > 4)", False),
        ("bad > 4 OR n = 5", True),
        ("price < 3", True),
        ("bad = 'five'", True),
    ],
)
def test_expression_selects_the_message_or_not(text: str, chosen: bool) -> None:
    assert compile_sql(text)(PROPERTIES) is chosen


@pytest.mark.parametrize(
    "text",
    [
        "", "n >", "> 5", "n = ", "n == 5", "(n = 5", "n = 5)", "n BETWEEN 1", "n BETWEEN 'a' AND 'b'", "n IN ()",
        "n IN (TRUE)", "n IS 5", "5", "'text'", "n = NULL", "n > 'a'", "n > TRUE", "n = 'open", "n BETWEEN 5 AND 1",
        "n NOT", "n NOT = 5", "city CONTAINS 5", "a b", "n = 5 AND", "n ; 5", "n = 5 OR OR n = 6", "n = 05", "n = 0L",
        "n = 5 n = 6", "city LIKE 'O%'", "NOT n > 5", "NOT n IN ('5')", "-n AND ok", "n > (ok = TRUE)", "n = 1e999",
        "n = 9223372036854775808", "TRUE = 5", "n = 5 /* open",
    ],
)  # fmt: skip
def test_malformed_expression_is_refused(text: str) -> None:
    with pytest.raises(SqlError):
        compile_sql(text)


@pytest.mark.parametrize(
    "text",
    [
        f"n IN ({','.join(repr(str(number)) for number in range(2000))})",
        " OR ".join(f"n = {number}" for number in range(1000)),
        f"n = '5' OR n = '{'x' * 200_000}'",
        "(" * 1000 + "n = 5" + ")" * 1000,
        "(" * 1000 + "n = 5" + "".join(f" OR n = {number})" for number in range(1000)),
        "".join(f"n = {number} OR (" for number in range(1000)) + "n = 5" + ")" * 1000,
        "NOT " * 150 + "(n = 5)",
    ],
    ids=["values", "comparisons", "text", "brackets", "OR nested left", "OR nested right", "NOT"],
)
def test_large_expression_is_accepted(text: str) -> None:
    assert compile_sql(text)(PROPERTIES)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (" AND ".join(["n = 5"] * 1025), "more than 4096 operators and operands"),
        ("-" * 100_000, "more than 4096 operators and operands"),
        ("(" * 100_000, "more than 4096 open brackets"),
        ("n IN (" + "1," * 100_000 + "2)", "more than 16384 tokens"),
        ("n IN (" + "'a'," * 60_000, "more than 16384 tokens"),
        ("n = " + "+" * 100_000 + "5", "more than 16384 tokens"),
        ("NOT " * 201 + "ok", "nested deeper than 200"),
        ("n" + " = n" * 250, "nested deeper than 200"),
        ("n = '" + "x" * (256 << 10) + "'", "more than 262144 bytes"),
    ],
)
def test_expression_above_a_limit_is_refused_with_the_limit(text: str, limit: str) -> None:
    with pytest.raises(SqlError, match=limit):
        compile_sql(text)


def test_error_for_a_long_token_is_short() -> None:
    with pytest.raises(SqlError) as caught:
        compile_sql(f"n = 5 '{'x' * 1000}'")
    assert str(caught.value) == f'"\'{"x" * 39}…" at 6 is out of place'


@pytest.mark.parametrize("end", ["", "x"])
@pytest.mark.parametrize("start", ["9", "0", "0.9", "1e9", "0x", " "])
def test_long_property_is_compared_in_linear_time(start: str, end: str) -> None:
    """A backtracking pattern would take minutes."""
    value = start + start[-1] * 32_000 + end
    assert compile_sql("n < 1 OR n = 1.5 OR n IS NOT NULL")({"n": value})


def test_compiled_filters_are_dropped_beyond_their_total_text() -> None:
    cache = sql92._Cache(100)
    first, second = f"n = '{'x' * 50}'", f"n = '{'y' * 50}'"
    kept = cache.get(first)
    assert cache.get(first) is kept
    cache.get(second)
    assert cache.get(first) is not kept


def test_large_expression_reads_fewer_records_per_step() -> None:
    assert limits_of(compile_sql("n = 5")) == (256, 1 << 20)
    large = compile_sql(" OR ".join(["n = 6"] * 1024))
    assert limits_of(large) == (256 // 15, (1 << 20) // 15)


@pytest.mark.parametrize("value", ["9" * 5000, "1_000", "nan", "inf", "0x10", "1e99999", "٣", ""])
def test_unusual_number_in_a_property_is_no_error(value: str) -> None:
    assert compile_sql("n < 1")({"n": value}) is False


def record(offset: int, sys_flag: int = 0) -> bytes:
    host = ("::1", 1) if sys_flag & BORN_HOST_V6 else ("127.0.0.1", 1)
    return encode_record(
        topic=b"T", body=b"x" * offset, properties=properties_to_bytes({"n": str(offset)}), queue_id=0, flag=0,
        queue_offset=offset, physical_offset=offset * 1000, sys_flag=sys_flag, born_timestamp=1, born_host=host,
        store_timestamp=2, store_host=("127.0.0.1", 2),
    )  # fmt: skip


def test_only_selected_records_are_returned() -> None:
    records = [record(offset, BORN_HOST_V6 if offset % 2 else 0) for offset in range(10)]
    read = GetResult(
        GetMessageStatus.FOUND, 10, 0, 10, [memoryview(b"".join(records[:4])), memoryview(b"".join(records[4:]))], 10
    )
    every = select(read, compile_sql("n >= 3 AND n <> 8"), 32, 1 << 20)
    assert [bytes(part) for part in every.buffers] == [records[i] for i in (3, 4, 5, 6, 7, 9)]
    assert (every.status, every.count, every.next_offset) == (GetMessageStatus.FOUND, 6, 10)
    some = select(read, compile_sql("n >= 3"), 2, 1 << 20)
    assert ([bytes(part) for part in some.buffers], some.next_offset) == (records[3:5], 5)
    small = select(read, compile_sql("n >= 3"), 32, 1)
    assert (len(small.buffers), small.next_offset) == (1, 4)
    none = select(read, compile_sql("n > 99"), 32, 1 << 20)
    assert (none.status, none.buffers, none.next_offset) == (GetMessageStatus.NO_MATCHED_MESSAGE, [], 10)
