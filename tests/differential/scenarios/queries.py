"""Messages by key 12 and by id 33, transactions 37, timers and recalls 370, replies 324 and 325."""

from __future__ import annotations

from tests.differential.scenarios.requests import create_topic, max_offset, properties, pull, send
from tests.differential.steps import Scenario, Step

T = "diff_query"
_UNIQUE = "7F0000010001000000000000000C0001"


def _query(name: str, key: str, /, *, topic: str = T, until: dict[str, object] | None = None, **more: object) -> Step:
    ext = {"topic": topic, "key": key, "maxNum": 32, "beginTimestamp": 0, "endTimestamp": (1 << 63) - 1, **more}
    return Step(name, 12, {field: value for field, value in ext.items() if value is not None}, until=until or {})


QUERIES = Scenario(
    "query",
    (
        create_topic("topic", T),
        send("one", T, "one", properties=properties(KEYS="k1 k2", UNIQ_KEY=_UNIQUE)),
        send("two", T, "two", properties=properties(KEYS="k2")),
        max_offset("there", T, 2),
        pull("places", T, step={"save": {"position": "body.0.physical_offset"}}),
        _query("by key", "k1", until={"code": 0}),
        _query("by a key of two", "k2", until={"code": 0}),
        _query("by unique key", _UNIQUE, _UNIQUE_KEY_QUERY=True),
        _query("unknown key", "k3"),
        _query("unknown topic", "k1", topic="diff_query_none"),
        _query("in the past", "k1", endTimestamp=1000),
        _query("in the future", "k1", beginTimestamp=1 << 42),
        _query("one of two", "k2", maxNum=1),
        _query("none", "k2", maxNum=0),
        _query("empty key", ""),
        _query("without key", "k", key=None),
        Step("query without fields", 12),
        Step("by place", 33, {"offset": "${position}"}),
        Step("by a wrong place", 33, {"offset": 3}),
        Step("by a place beyond", 33, {"offset": 1 << 50}),
        Step("by a negative place", 33, {"offset": -1}),
        Step("by no place", 33),
    ),
)

_PG = "diff_tx_producer"


def _half(name: str, key: str, unique: str, topic: str = T + "_tx") -> Step:
    raw = properties(KEYS=key, UNIQ_KEY=unique, TRAN_MSG="true", PGROUP=_PG)
    save = {"position": "ext.msgId", "queue_offset": "ext.queueOffset", "transaction": "ext.transactionId"}
    return send(name, topic, name, sysFlag=4, properties=raw, producerGroup=_PG, step={"save": save})


def _end(name: str, decision: object, *, patience_s: float = 20.0, **fields: object) -> Step:
    ext = {
        "producerGroup": _PG,
        "tranStateTableOffset": "${queue_offset}",
        "commitLogOffset": "${position:place}",
        "commitOrRollback": decision,
        "fromTransactionCheck": False,
        "msgId": "${transaction}",
        "transactionId": "${transaction}",
        "topic": T + "_tx",
        **fields,
    }
    given = {field: value for field, value in ext.items() if value is not None}
    return Step(name, 37, given, patience_s=patience_s)


_IDS = [f"7F0000010001000000000000000D000{i}" for i in range(4)]
TRANSACTIONS = Scenario(
    "transaction",
    (
        create_topic("topic", T + "_tx"),
        _half("half", "k1", _IDS[0]),
        Step("not there yet", 30, {"topic": T + "_tx", "queueId": 0}),
        _end("by another group", 8, producerGroup="diff_tx_other"),
        _end("commit", 8),
        pull("committed", T + "_tx", step={"until": {"code": 0}}),
        _half("half to roll back", "k2", _IDS[1]),
        _end("unknown", 0, patience_s=1),
        _end("roll back", 12),
        _half("half with a wrong offset", "k3", _IDS[2]),
        _end("wrong place in the queue", 8, tranStateTableOffset=99),
        _end("wrong place in the log", 8, commitLogOffset=1 << 50),
        _end("no decision", 8, commitOrRollback=None),
        _end("odd decision", 3, patience_s=1),
        _end("from a check", 8, fromTransactionCheck=True),
        pull("two are committed", T + "_tx", 1, step={"until": {"code": 0}}),
        Step("end without fields", 37),
        Step("check again without fields", 323),
        Step("check an unknown message again", 323, {"topic": T + "_tx", "msgId": "7F00000100002A9F7FFFFFFFFFFFFF00"}),
        create_topic("another topic", T + "_twice"),
        _half("half to commit twice", "k4", _IDS[3], T + "_twice"),
        _end("commit once", 8, topic=T + "_twice"),
        pull("committed once", T + "_twice", step={"until": {"code": 0}}),
        _end("commit twice", 8, topic=T + "_twice"),
        pull("committed twice", T + "_twice", 1, step={"until": {"code": 0}, "patience_s": 2}),
    ),
)

TIMERS = Scenario(
    "timer",
    (
        create_topic("topic", T + "_d", readQueueNums=6, writeQueueNums=6),
        create_topic("topic of others", T + "_e"),
        send("level 1", T + "_d", "level 1", properties=properties(DELAY="1", KEYS="k")),
        send("level 3", T + "_e", queueId=1, properties=properties(DELAY="3")),
        send("level 99", T + "_e", queueId=1, properties=properties(DELAY="99")),
        send("level 0", T + "_d", "level 0", queueId=1, properties=properties(DELAY="0")),
        send("level no number", T + "_e", properties=properties(DELAY="x")),
        send("by seconds", T + "_d", "by seconds", queueId=2, properties=properties(TIMER_DELAY_SEC="1")),
        send("by ms", T + "_d", "by ms", queueId=3, properties=properties(TIMER_DELAY_MS="900")),
        send("in the past", T + "_d", "past", queueId=4, properties=properties(TIMER_DELIVER_MS="1000")),
        send("too far", T + "_e", properties=properties(TIMER_DELAY_SEC="99999999")),
        send("no number", T + "_e", properties=properties(TIMER_DELAY_SEC="soon")),
        send("negative", T + "_e", queueId=1, properties=properties(TIMER_DELAY_SEC="-5")),
        send(
            "to be recalled",
            T + "_d",
            properties=properties(TIMER_DELAY_SEC="3600", UNIQ_KEY="7F0000010001000000000000000E0001"),
            step={"save": {"handle": "ext.recallHandle"}},
        ),
        Step("recall", 370, {"topic": T + "_d", "recallHandle": "${handle}", "producerGroup": "diff_producer"}),
        Step("recall nonsense", 370, {"topic": T + "_d", "recallHandle": "nonsense"}),
        Step("recall in an unknown topic", 370, {"topic": "diff_query_none", "recallHandle": "${handle}"}),
        Step("recall without handle", 370, {"topic": T + "_d"}),
        *(
            pull(f"there, {kind}", T + "_d", queueId=queue, step={"until": {"code": 0}})
            for queue, kind in enumerate(("by level", "at once", "by seconds", "by ms", "from the past"))
        ),
    ),
)

REPLIES = Scenario(
    "reply",
    (
        create_topic("topic", T + "_r"),
        send("without properties", T + "_r", code=324),
        send("to nobody", T + "_r", code=325, properties=properties(REPLY_TO_CLIENT="nobody", CORRELATION_ID="c1")),
        send("v1 to nobody", T + "_r", code=324, properties=properties(REPLY_TO_CLIENT="nobody", CORRELATION_ID="c1")),
        Step("no fields", 325),
        Step("no fields v1", 324),
    ),
)

SCENARIOS = (QUERIES, TRANSACTIONS, TIMERS, REPLIES)
