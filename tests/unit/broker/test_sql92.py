"""The SQL92 subset: what is selected, what is refused, and the filter over real records."""

import pytest

from broker.reading.record_filter import select
from broker.reading.sql92 import SqlError, compile_sql
from broker.store.message_store import GetResult
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
        ("ok", True),
        ("NOT ok", False),
        ("TRUE", True),
        ("FALSE OR TAGS = 'even'", True),
        # AND binds tighter than OR, NOT tighter than both.
        ("n = 5 OR n = 5 AND n = 6", True),
        ("(n = 5 OR n = 5) AND n = 6", False),
        ("NOT n = 6 AND city = 'Rome'", False),
        # Unknown is neither, and only a known side decides.
        ("nothing = 1", False),
        ("NOT nothing = 1", False),
        ("nothing <> 1", False),
        ("nothing = 1 OR n = 5", True),
        ("NOT (nothing = 1 AND n = 6)", True),
        ("bad > 4", False),
        ("NOT bad > 4", False),
        ("bad = 'five'", True),
    ],
)
def test_an_expression_selects(text: str, chosen: bool) -> None:
    assert compile_sql(text)(PROPERTIES) is chosen


@pytest.mark.parametrize(
    "text",
    [
        "", "n >", "> 5", "n = ", "n == 5", "(n = 5", "n = 5)", "n BETWEEN 1", "n BETWEEN 'a' AND 'b'", "n IN ()",
        "n IN (TRUE)", "n IS 5", "5", "'text'", "NULL", "n = NULL", "n > 'a'", "n > TRUE", "5 IS NULL", "n = 'open",
        "n NOT", "n NOT = 5", "city CONTAINS 5", "a b", "n = 5 AND", "n ; 5", "n = 5 OR OR n = 6",
        " AND ".join(["n = 5"] * 65), "(" * 33 + "n = 5" + ")" * 33, "NOT " * 33 + "ok", "n = '" + "x" * 2048 + "'",
        "n IN (" + ",".join(["1"] * 64) + ")",
    ],
)  # fmt: skip
def test_a_wrong_or_too_large_expression_is_refused(text: str) -> None:
    with pytest.raises(SqlError):
        compile_sql(text)


def test_limits_leave_room_for_what_is_allowed() -> None:
    assert compile_sql(" AND ".join(["n = 5"] * 64))(PROPERTIES)
    assert compile_sql("(" * 30 + "n = 5" + ")" * 30)(PROPERTIES)


@pytest.mark.parametrize("value", ["9" * 5000, "1_000", "nan", "inf", "0x10", "1e99999", "٣", ""])
def test_a_strange_number_is_no_error(value: str) -> None:
    assert compile_sql("n < 1")({"n": value}) is False


def record(offset: int, sys_flag: int = 0) -> bytes:
    host = ("::1", 1) if sys_flag & BORN_HOST_V6 else ("127.0.0.1", 1)
    return encode_record(
        topic=b"T", body=b"x" * offset, properties=properties_to_bytes({"n": str(offset)}), queue_id=0, flag=0,
        queue_offset=offset, physical_offset=offset * 1000, sys_flag=sys_flag, born_timestamp=1, born_host=host,
        store_timestamp=2, store_host=("127.0.0.1", 2),
    )  # fmt: skip


def test_only_wanted_records_are_kept() -> None:
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
