"""Tables of an Apache master."""

from __future__ import annotations

# In fastjson's format: bare numbers as keys.
TOPICS = (
    '{"dataVersion":{"counter":%d,"stateVersion":0,"timestamp":1700000000000},"mappingDataVersion":{"counter":0},'
    '"topicConfigTable":{"t":{"attributes":{},"order":false,"perm":6,"readQueueNums":4,"topicFilterType":"SINGLE_TAG",'
    '"topicName":"t","topicSysFlag":0,"writeQueueNums":4}%s},"topicQueueMappingDetailMap":{}}'
)
GROUPS = (
    '{"dataVersion":{"counter":7,"stateVersion":0,"timestamp":1700000000000},"forbiddenTable":{"g":{"t":4},"h":{"t":0}},'
    '"subscriptionGroupTable":{"g":{"groupName":"g","retryMaxTimes":3,"consumeTimeoutMinute":15,"brokerId":0,'
    '"groupRetryPolicy":{"type":"CUSTOMIZED"},"attributes":{}}}}'
)
MODES = (
    '{"messageRequestModeMap":{"t":{"g":{"consumerGroup":"g","mode":"POP","popShareQueueNum":2,"topic":"t",'
    '"version":"V5_3_3","suspend":false}}}}'
)
