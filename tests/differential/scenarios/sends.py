"""SEND_MESSAGE 10, SEND_MESSAGE_V2 310, SEND_BATCH_MESSAGE 320: accepted and refused messages."""

from __future__ import annotations

from neve.record.bodies import encode_batch
from tests.differential.scenarios.requests import SEND, SEND_BATCH, create_topic, max_offset, properties, pull, send
from tests.differential.steps import Scenario, Step

T = "diff_send"
_ALL = properties(
    KEYS="k1 k2",
    TAGS="red",
    UNIQ_KEY="7F0000010001000000000000000A0001",
    WAIT="true",
    colour="blue",
    __SHARDINGKEY="s1",
    CLUSTER="elsewhere",
    INSTANCE_ID="i1",
    empty="",
)
_BATCH = encode_batch([(f"b{i}".encode(), i, properties(KEYS=f"key{i}", TAGS="t").encode()) for i in range(3)])
_WITH_IDS = encode_batch([(b"own id", 0, properties(UNIQ_KEY="7F0000010001000000000000000B0002").encode())])
_DELAYED = encode_batch([(b"later", 0, properties(DELAY="1").encode())])

TAKEN = Scenario(
    "send",
    (
        create_topic("topic", T),
        send("v2", T),
        send("v1", T, code=SEND),
        send("all properties", T, "ü€😀", properties=_ALL, flag=7, queueId=1),
        send("no properties", T, properties=None),
        send("odd properties", T, properties="novalue\x02\x01noname\x02a\x01b"),
        create_topic("topic for the odd", T + "_o"),
        send("empty body", T + "_o", b""),
        send("compressed flag kept", T, b"\x78\x9c\x03\x00\x00\x00\x00\x01", sysFlag=1),
        send("unknown flag bits", T, sysFlag=1 << 12),
        send("without unit mode", T, unitMode=None, reconsumeTimes=None, batch=None),
        send("reconsume times", T, reconsumeTimes=3),
        send("max reconsume times", T, maxReconsumeTimes=5),
        send("broker name given", T, brokerName="${broker_name}"),
        create_topic("topic of one queue", T + "_1", readQueueNums=1, writeQueueNums=1),
        send("any queue", T + "_1", queueId=-1),
        send("wait false", T, properties=properties(WAIT="false")),
        send("one way", T, b"one way", step={"oneway": True}),
        max_offset("one way has arrived", T, 12),
        pull("what is there", T, step={"until": {"code": 0, "ext.maxOffset": "12"}}),
        pull("what is there 1", T, queueId=1, step={"until": {"code": 0}}),
    ),
)

REFUSED = Scenario(
    "send refused",
    (
        create_topic("topic", T + "_r"),
        create_topic("read only", T + "_ro", perm=4),
        create_topic("write only", T + "_wo", perm=2),
        create_topic("fewer write queues", T + "_w1", writeQueueNums=1, readQueueNums=2),
        send("to a topic without write", T + "_ro"),
        send("to a topic without read", T + "_wo"),
        send("beyond the write queues", T + "_w1", queueId=1),
        send("beyond all queues", T + "_w1", queueId=2),
        send("queue 99", T + "_r", queueId=99),
        send("queue -2", T + "_w1", queueId=-2),
        send("made by the default topic", "diff_send_new", defaultTopicQueueNums=3),
        Step("its config", 351, {"topic": "diff_send_new", "lo": True}),
        send("made with more queues than the default topic", "diff_send_new8", defaultTopicQueueNums=32),
        Step("its config 8", 351, {"topic": "diff_send_new8", "lo": True}),
        send("unknown topic, unknown default", "diff_send_none", defaultTopic="diff_no_default"),
        send("default is an ordinary topic", "diff_send_ord", defaultTopic=T + "_r"),
        send("default is missing", "diff_send_nodef", defaultTopic=None),
        send("topic with a space", "bad name"),
        send("topic with a dot", "bad.name"),
        send("topic too long", "x" * 128),
        send("topic of 127", "x" * 127),
        send("topic empty", ""),
        send("topic missing", T + "_r", topic=None),
        send("group missing", T + "_w1", producerGroup=None),
        send("queue missing", T + "_r", queueId=None),
        send("queue not a number", T + "_r", queueId="zero"),
        send("queue beyond 32 bits", T + "_r", queueId=1 << 40),
        send("flag missing", T + "_r", flag=None),
        send("sys flag missing", T + "_r", sysFlag=None),
        send("born time missing", T + "_r", bornTimestamp=None),
        send("born time not a number", T + "_r", bornTimestamp="soon"),
        send("v1 with letters", T + "_r", code=SEND, topic=None, b=T),
        send("system topic", "SCHEDULE_TOPIC_XXXX"),
        send("half topic", "RMQ_SYS_TRANS_HALF_TOPIC"),
        send("default topic", "TBW102"),
        send("self test", "SELF_TEST_TOPIC"),
        send("benchmark topic", "BenchmarkTest"),
        send("trace topic", "RMQ_SYS_TRACE_TOPIC"),
        send("retry topic of an unknown group", "%RETRY%diff_nobody"),
        send("dlq topic of an unknown group", "%DLQ%diff_nobody"),
        send("body of 4 MiB", T + "_r", b"x" * (4 << 20)),
        send("body just too large", T + "_r", b"x" * ((4 << 20) + 1)),
        send("properties too long", T + "_r", properties="k\x01" + "v" * 32768 + "\x02"),
        send("properties at the limit", T + "_r", properties="k\x01" + "v" * 32764 + "\x02"),
        Step("no fields", 310),
        Step("no fields v1", 10),
        max_offset("how long it is", T + "_r", 1),
    ),
)

BATCHES = Scenario(
    "send batch",
    (
        create_topic("topic", T + "_b"),
        send("three", T + "_b", _BATCH, code=SEND_BATCH),
        send(
            "three with a unique key",
            T + "_b",
            _BATCH,
            code=SEND_BATCH,
            properties=properties(UNIQ_KEY="7F0000010001000000000000000B0001"),
        ),
        send("one", T + "_b", encode_batch([(b"only", 0, b"")]), code=SEND_BATCH),
        send("as 310 with the batch flag", T + "_b", _BATCH, batch=True),
        send("320 without the batch flag", T + "_b", _BATCH, code=SEND_BATCH, batch=False, queueId=1),
        send(
            "own id and a common one",
            T + "_b",
            _WITH_IDS,
            code=SEND_BATCH,
            properties=properties(UNIQ_KEY="7F0000010001000000000000000B0003"),
        ),
        send("empty", T + "_b", b"", code=SEND_BATCH),
        send("to a retry topic", "%RETRY%diff_group", _BATCH, code=SEND_BATCH),
        send("of a delayed kind", T + "_b", _BATCH, code=SEND_BATCH, properties=properties(DELAY="1")),
        send("of a transaction", T + "_b", _BATCH, code=SEND_BATCH, sysFlag=4),
        send("with a delayed message", T + "_b", _DELAYED, code=SEND_BATCH, queueId=1),
        send("malformed", T + "_b", b"\x00\x00\x00\x05xyz", code=SEND_BATCH),
        send("too large", T + "_b", encode_batch([(b"x" * (1 << 20), 0, b"")] * 4), code=SEND_BATCH),
        pull("what is there", T + "_b", step={"until": {"code": 0, "ext.maxOffset": "11"}}),
    ),
)

SCENARIOS = (TAKEN, REFUSED, BATCHES)
