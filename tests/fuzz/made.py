"""Valid requests that stock clients send rarely or never, so that the recorder misses them; made by hand."""

from __future__ import annotations

from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand, encode_command
from tests.fuzz.corpus import Direction, Recorded

PLACE = {"topic": "traffic", "group": "traffic_plain", "consumerGroup": "traffic_plain", "queueId": "0"}
POP = {**PLACE, "maxMsgNums": "8", "invisibleTime": "1000", "pollTime": "0", "bornTime": "0", "initMode": "0"}
ACK = (
    b'{"brokerName":"broker-a","acks":[{"c":"traffic_plain","t":"traffic","r":"0","so":0,"q":0,"rq":0,"pt":1700000000000,'
    b'"it":1000,"b":"Bw=="}]}'
)
TOPIC = (
    b'{"topicConfigList":[{"topicName":"traffic","readQueueNums":4,"writeQueueNums":4,"perm":6,'
    b'"topicFilterType":"SINGLE_TAG","topicSysFlag":0,"order":false,"attributes":{"+reserve.time":"72"}}]}'
)
LOCKED = (
    b'{"consumerGroup":"traffic_plain","clientId":"c@1",'
    b'"mqSet":[{"brokerName":"broker-a","queueId":0,"topic":"traffic"}]}'
)
MEMBER = {**PLACE, "clientId": "c@1", "msgId": "7F00000100002A9F0000000000000000", "clientAddr": "c@1"}
SEND = {
    "producerGroup": "p", "topic": "traffic", "defaultTopic": "TBW102", "defaultTopicQueueNums": "4", "queueId": "0",
    "sysFlag": "0", "bornTimestamp": "1700000000000", "flag": "0", "properties": "TAGS\x01even\x02",
    "reconsumeTimes": "0",
}  # fmt: skip
REPLY = "MSG_TYPE\x01reply\x02CORRELATION_ID\x011\x02REPLY_TO_CLIENT\x01c@1\x02TTL\x013000\x02"
REQUESTS: tuple[tuple[Code, dict[str, str], bytes], ...] = (
    (Code.UPDATE_AND_CREATE_TOPIC_LIST, {}, TOPIC),
    (Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, {}, b'{"groupConfigList":[{"groupName":"traffic_plain"}]}'),
    (Code.VIEW_MESSAGE_BY_ID, {"offset": "0", "topic": "traffic"}, b""),
    (Code.SEND_MESSAGE, SEND, b"long names"),
    (Code.SEND_REPLY_MESSAGE, {**SEND, "topic": "DefaultCluster_REPLY_TOPIC", "properties": REPLY}, b"answer"),
    (Code.LOCK_BATCH_MQ, {}, LOCKED),
    (Code.UNLOCK_BATCH_MQ, {}, LOCKED),
    (Code.GET_ALL_CONSUMER_OFFSET, {}, b""),
    (Code.GET_ALL_DELAY_OFFSET, {}, b""),
    (Code.GET_ALL_MESSAGE_REQUEST_MODE, {}, b""),
    (Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {}, b""),
    (Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, {}, b""),
    (Code.GET_BROKER_EPOCH_CACHE, {}, b""),
    (Code.GET_ALL_PRODUCER_INFO, {}, b""),
    (Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, MEMBER, b""),
    (Code.GET_CONSUMER_RUNNING_INFO, MEMBER, b""),
    (Code.CONSUME_MESSAGE_DIRECTLY, MEMBER, b""),
    (Code.QUERY_CONSUME_TIME_SPAN, PLACE, b""),
    (Code.QUERY_CORRECTION_OFFSET, {**PLACE, "compareGroup": "traffic_sql", "filterGroups": "a,b"}, b""),
    (Code.CLONE_GROUP_OFFSET, {"srcGroup": "traffic_plain", "destGroup": "copy", "topic": "traffic"}, b""),
    (Code.RESUME_CHECK_HALF_MESSAGE, {"topic": "traffic", "msgId": "7F00000100002A9F0000000000000000"}, b""),
    (Code.QUERY_TOPICS_BY_CONSUMER, PLACE, b""),
    (Code.QUERY_SUBSCRIPTION_BY_CONSUMER, PLACE, b""),
    (Code.GET_SUBSCRIPTIONGROUP_CONFIG, PLACE, b""),
    (Code.UPDATE_AND_GET_GROUP_FORBIDDEN, {**PLACE, "readable": "true"}, b""),
    (
        Code.SET_MESSAGE_REQUEST_MODE,
        {},
        b'{"topic":"traffic","consumerGroup":"g","mode":"POP","popShareQueueNum":0}',
    ),
    (Code.PEEK_MESSAGE, POP, b""),
    (Code.POP_MESSAGE, {**POP, "queueId": "-1", "order": "true", "exp": "even", "expType": "TAG"}, b""),
    (Code.NOTIFICATION, POP, b""),
    (Code.POLLING_INFO, PLACE, b""),
    (Code.BATCH_ACK_MESSAGE, {}, ACK),
    (
        Code.POP_ROLLBACK,
        {**PLACE, "offset": "0", "extraInfo": "0 1700000000000 1000 0 0 broker-a 0 0"},
        b"",
    ),
    (
        Code.CHANGE_MESSAGE_INVISIBLETIME,
        {**PLACE, "offset": "0", "extraInfo": "0 1700000000000 1000 0 0 broker-a 0 0", "invisibleTime": "500"},
        b"",
    ),
    (Code.AUTH_UPDATE_ACL, {"subject": "User:someone"}, b'{"subject":"User:someone","policies":[]}'),
)


def recorded() -> list[Recorded]:
    """Return each request in both dialects."""
    return [
        Recorded(Direction.CLIENT_TO_BROKER, b"".join(encode_command(command))[4:])
        for code, ext, body in REQUESTS
        for dialect in (0, 1)
        for command in (RemotingCommand(code, 7, ext=ext, body=body, serialize_type=dialect, language="JAVA"),)
    ]
