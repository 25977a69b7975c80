from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neve.errors import ProtocolError
from neve.remoting.body import (
    BrokerData,
    HeartbeatData,
    MessageQueue,
    dumps_object_keys,
    dumps_standard,
    lenient_loads,
    loads_as,
)
from neve.remoting.headers import (
    BadHeader,
    PullMessageHeader,
    optional_bool,
    optional_int,
    parse_header,
    parse_send_header,
    require_int,
    require_str,
)

SHORT = dict(zip("abcdefgh", ["g", "t", "TBW102", "4", "1", "0", "1700000000000", "5"], strict=True))
LONG = dict(
    zip(
        [
            "producerGroup",
            "topic",
            "defaultTopic",
            "defaultTopicQueueNums",
            "queueId",
            "sysFlag",
            "bornTimestamp",
            "flag",
        ],
        SHORT.values(),
        strict=True,
    )
)


def test_send_header_has_two_spellings() -> None:
    for code, ext in ((310, SHORT), (320, SHORT), (325, SHORT), (10, LONG), (324, LONG)):
        header = parse_send_header(code, ext)
        assert (header.topic, header.queue_id, header.born_timestamp, header.flag) == ("t", 1, 1700000000000, 5)
        assert header.properties is None
    assert parse_send_header(310, SHORT | {"m": "true", "n": "broker-a", "lo": "x"}).batch is True


@pytest.mark.parametrize("change", [{"e": "x"}, {"e": str(2**31)}, {"g": str(2**63)}, {"e": ""}])
def test_send_header_of_wrong_type(change: dict[str, str]) -> None:
    with pytest.raises(BadHeader):
        parse_send_header(310, SHORT | change)


def test_missing_field_is_named() -> None:
    with pytest.raises(BadHeader, match="topic"):
        require_str({}, "topic")
    with pytest.raises(BadHeader):
        parse_header({"topic": "t"}, PullMessageHeader)


def test_non_numeric_field_is_named() -> None:
    ext = {"a": "7", "b": "TRUE", "c": "", "huge": "9" * 21, "over": str(2**63)}
    assert require_int(ext, "a") == 7
    assert optional_int(ext, "c", 4) == 4
    assert optional_bool(ext, "b")
    assert optional_bool(ext, "none", default=True)
    for name in ("b", "c", "huge", "over", "none"):
        with pytest.raises(BadHeader) as caught:
            require_int(ext, name)
        assert caught.value.code == 1


def test_dialect_object_keys_and_references() -> None:
    raw = b"""{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"t"}:{"x":1.5},
        {"queueId":1,"topic":"t","brokerName":"b"}:{"$ref":"$.list[0]"}}, list:[{1:'it\\'s "so"'}], ok:true}"""
    parsed = lenient_loads(raw)
    assert parsed["offsetTable"][MessageQueue("t", "b", 0)] == {"x": 1.5}
    assert parsed["offsetTable"][MessageQueue("t", "b", 1)] == {1: 'it\'s "so"'}
    assert parsed["ok"] is True
    assert lenient_loads(b'{"a":{"$ref":"$.nowhere[3]"}}')["a"] is None
    assert lenient_loads(b'{{"k":1}:2}') == {(("k", 1),): 2}


def test_dialect_survives_encoding_and_decoding() -> None:
    table = {MessageQueue("t", "bröker", 3): {"offset": 5, "none": None}, MessageQueue("t", "b", 4): {"set": [1, "a"]}}
    assert lenient_loads(dumps_object_keys({"offsetTable": table}))["offsetTable"] == {
        MessageQueue("t", "bröker", 3): {"offset": 5},
        MessageQueue("t", "b", 4): {"set": [1, "a"]},
    }
    assert dumps_object_keys({MessageQueue("t", "b", 1): 2}) == b'{{"brokerName":"b","queueId":1,"topic":"t"}:2}'


def test_number_keys_in_both_spellings() -> None:
    data = BrokerData("c", "b", {0: "1.2.3.4:1"})
    assert loads_as(b'{cluster:"c",brokerName:"b",brokerAddrs:{0:"1.2.3.4:1"}}', BrokerData) == data
    assert loads_as(dumps_standard(data), BrokerData) == data
    assert b"{0:" in dumps_object_keys(data)


def test_java_heartbeat_is_parsed() -> None:
    raw = (
        b'{"clientID":"1@2","consumerDataSet":[{"consumeFromWhere":"CONSUME_FROM_LAST_OFFSET","consumeType":'
        b'"CONSUME_PASSIVELY","groupName":"g","messageModel":"CLUSTERING","subscriptionDataSet":[{"classFilterMode":false,'
        b'"codeSet":[65],"expressionType":"TAG","subString":"A","subVersion":3,"tagsSet":["A"],"topic":"t"}],'
        b'"unitMode":false}],"heartbeatFingerprint":0,"producerDataSet":[{"groupName":"p"}],"withoutSub":false}'
    )
    heartbeat = loads_as(raw, HeartbeatData)
    assert heartbeat.client_id == "1@2"
    assert heartbeat.consumer_data_set[0].subscription_data_set[0].code_set == (65,)


@pytest.mark.parametrize("raw", [b"", b"{", b"{a", b"{a:" * 40 + b"1" + b"}" * 40, b"[1 2]", b"\xff", b'{"a":"', b"x"])
def test_malformed_bodies_are_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        lenient_loads(raw)


@given(st.text(alphabet="{}[]:,'\"\\$ref0a. ", max_size=40))
def test_garbage_bodies_end_in_a_protocol_error(text: str) -> None:
    try:
        lenient_loads(text.encode())
    except ProtocolError:
        return
