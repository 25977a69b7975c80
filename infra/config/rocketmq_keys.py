"""The treatment of every key of a broker.conf or namesrv.conf of RocketMQ 5.3.3.

RocketMQ sets a key through the setter of its name in any of its configuration classes, and silently ignores others.
Here a key is *honoured* (a field of neve's configuration), *ignored* (without effect here: a warning gives the reason,
unless the value is RocketMQ's default), or *refused*, because ignoring it would break a guarantee of the file. A test
compares the reasons with docs/reference/rocketmq-keys.md.

The table consists of a class and a colon, then lines `reason key=default …`; the default `*` depends on the machine.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

BROKER = ("BrokerConfig", "BrokerIdentity", "MessageStoreConfig", "NettyServerConfig", "NettyClientConfig",
          "AuthConfig", "tieredstore.MessageStoreConfig", "RocketMQ 3 and 4")  # fmt: skip
CONTROLLER = ("a controller's ControllerConfig", "NettyServerConfig", "NettyClientConfig")
NAMESRV = ("NamesrvConfig", "NettyServerConfig", "NettyClientConfig", "ControllerConfig", "JraftConfig")

HONOURED = "honoured"
#: Old spellings of honoured keys.
ALIASES = {"mapedFileSizeCommitLog": "mappedFileSizeCommitLog"}

#: Why a key is ignored.
REASONS = {
    "threads": "requests are answered on one loop: there are no thread pools, and no queues before them",
    "one-copy": "replication within a broker set is fixed, but for the keys beside `replication`",
    "log": "the log is written, flushed and read as `flushDiskType` and `flushIntervalCommitLog` define",
    "room": "only `fileReservedTime`, `diskMaxUsedSpaceRatio` and `hotBytes` delete segments",
    "queues": "queues and key index have neve's own files below `storePathRootDir`, rebuilt from the log",
    "store": "there is one kind of store: no RocksDB, no batch or compacted queues",
    "pop": "pop stores its state in another way, and answers as RocketMQ does",
    "timer": "timers are kept in memory and in the log; `timerMaxPending` and `timerMaxDelaySec` bound them",
    "transactions": "half messages are resolved in the log after `transactionTimeOut`",
    "registration": "a broker registers with every name server each `registerNameServerPeriod` and after changes",
    "connections": "sockets have the system's settings; `maxConnections` limits their number",
    "clients": "requests to other servers have fixed limits",
    "reads": "a pull returns up to the requested number; cold reads take turns and delay no other reads",
    "filter": "filters are computed when a message is read; nothing is precomputed or cached on disk",
    "statistics": "statistics and metrics are at `adminPort` and in `mqadmin`",
    "trace": "traces go to the topic of the client; `traceTopicEnable` creates the default one",
    "balance": "queues are assigned among the members that are connected",
    "offsets": "group offsets are saved every `flushConsumerOffsetInterval`, and with the archive's state",
    "topics": "topics and groups are created by `mqadmin` or by their first use",
    "users": "users and policies are in `authConfigPath`; every request is checked against the current ones",
    "acl-v1": "users of plain_acl.yml are not imported: create them",
    "one-controller": "broker sets are in a file below `controllerStorePath` or in etcd (`registerUrl`), without Raft",
    "place": "the paths are `storePathRootDir`, `kvConfigPath` and `authConfigPath`",
    "plug-in": "it belongs to the tiered store plug-in: neve's archive is `storeUrl`, and TTLs belong to topics",
    "container": "a process is one broker",
    "start": "a server answers from its start, with the registrations that it has",
    "internal": "it tunes the internals of RocketMQ's servers",
    "no-setter": "RocketMQ has no setter for it, and does not read it either",
}

#: The replacement of an ignored or refused key, if there is one.
INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("metricsExporterType", "metricsPromExporterPort", "metricsPromExporterHost"),
                    "adminPort; Prometheus reads /metrics there"),
    "metricsGrpcExporterTarget": "metricsExporterType=PROM; Prometheus, or a collector, reads them there",
    **dict.fromkeys(("tieredBackendServiceProvider", "tieredStoreFilePath", "objectStoreEndpoint", "objectStoreBucket"),
                    "storeUrl=dir:DIRECTORY or s3://BUCKET/PREFIX?endpoint=…&region=…"),
    **dict.fromkeys(("objectStoreAccessKey", "objectStoreSecretKey"), "AWS_ACCESS_KEY_ID … in the environment"),
    "tieredStoreFileReservedTime": "defaultTtlHours, or a topic's reserve.time",
    "tieredStoreDeleteFileEnable": "defaultTtlHours=-1 keeps for ever",
    "commitLogRollingInterval": "archiveMaxAge",
    "commitLogRollingMinimumSize": "archiveMinBytes",
    **dict.fromkeys(("readAheadCacheEnable", "readAheadCacheSizeThresholdRate", "readAheadMessageSizeThreshold"),
                    "coldCacheBytes, coldCacheDiskBytes"),
    "tieredStoreMaxPendingLimit": "archiveUploads, archiveUploadBytes",
    **dict.fromkeys(("storePathConsumeQueue", "storePathIndex", "storeCheckpoint", "abortFile", "storePathDelayOffset",
                     "storePathEpochFile", "storePathBrokerIdentity"), "storePathRootDir, which has it all"),
    **dict.fromkeys(("configStorePath", "brokerConfigPath"), "-c FILE"),
    **dict.fromkeys(("flushCommitLogTimed", "flushCommitLogThoroughInterval", "commitIntervalCommitLog",
                     "commitCommitLogThoroughInterval"), "flushIntervalCommitLog"),
    "flushCommitLogSync": "flushDiskType=SYNC_FLUSH",
    "putMessageTimeout": "syncFlushTimeout",
    "logicalDiskSpaceCleanForciblyThreshold": "diskSpaceCleanForciblyRatio",
    "checkTransactionMessageEnable": "transactionCheckMax, transactionCheckInterval",
    **dict.fromkeys(("timerMetricSmallThreshold", "timerCongestNumEachSlot"), "timerMaxPending"),
    "haMaxGapNotInSync": "haMaxTimeSlaveNotCatchup",
    "brokerNotActiveTimeoutMillis": "controllerHeartBeatTimeoutMills",
    **dict.fromkeys(("dLegerGroup", "dLegerPeers", "dLegerSelfId", "preferredLeaderId", "enableDLegerCommitLog"),
                    "replication=sync and controllerAddr; brokerElectionPriority prefers one"),
    "fetchControllerAddrByDnsLookup": "controllerAddr",
    "migrateAuthFromV1Enabled": "initAuthenticationUser, then `mqadmin createUser` and `createAcl`",
    **dict.fromkeys(("clientRequestThreadPoolQueueCapacity", "sendThreadPoolQueueCapacity",
                     "serverSocketRcvBufSize", "serverSocketSndBufSize"), "maxUnfinishedBytes bounds what waits"),
    "pullThreadPoolQueueCapacity": "maxHeldPulls",
    **dict.fromkeys(("coldDataFlowControlEnable", "cgColdReadThreshold", "globalColdReadThreshold",
                     "coldCtrStrategyEnable", "disableConsumeIfConsumerReadSlowly"),
                    "coldReadPriority, coldFetchBytes, coldReadTimeout"),
    "msgTraceTopicName": "traceTopicEnable, and the clients' own trace topic",
    "storePathCommitLog": "storePathRootDir on that disk; for an import a link named commitlog",
    "readOnlyCommitLogStorePaths": "storeUrl: what is old goes there",
    "brokerRole": "ASYNC_MASTER; with replication=sync a broker set has several copies",
    "haMasterAddress": "namesrvAddr: a slave asks the name servers where its master is",
    "supportActingMaster": "slaveReadEnable, or a broker set with replication",
    "messageStorePlugIn": "storeUrl",
}  # fmt: skip


class OtherDefault(NamedTuple):
    """RocketMQ's default of an honoured key, and why neve has another one."""

    theirs: str
    why: str


#: By neve's configuration class: keys whose absence from a file has another effect than in RocketMQ.
OTHER_DEFAULTS: Mapping[str, Mapping[str, OtherDefault]] = {
    "BrokerConfig": {
        "brokerName": OtherDefault("the machine's name", "a name is in every message id and route: write it down"),
        "enablePropertyFilter": OtherDefault("false", "SQL filters work without a key"),
        "recallMessageEnable": OtherDefault("false", "timed messages can be recalled without a key"),
        "haListenPort": OtherDefault("10912", "0 is listenPort + 1, and listened on in a broker set alone"),
        "haMaxTimeSlaveNotCatchup": OtherDefault("15000", "a frozen slave keeps sends waiting for so long"),
        "controllerHeartBeatTimeoutMills": OtherDefault("10000", "a frozen master is replaced sooner"),
    },
    "NamesrvConfig": {
        "scanNotActiveBrokerInterval": OtherDefault("5000", "a broker that is gone has closed its connection"),
    },
    "ControllerConfig": {
        "scanNotActiveBrokerInterval": OtherDefault("5000", "a frozen master is replaced sooner"),
        "controllerDLegerGroup": OtherDefault("", "there is no Raft group, but requests name one"),
        "controllerDLegerSelfId": OtherDefault("", "there is no Raft group, but requests name one"),
        "controllerStorePath": OtherDefault("", "a controller keeps its sets somewhere"),
    },
}

_TABLE = """
BrokerConfig:
honoured maxPopPollingSize brokerPermission defaultTopicQueueNums autoCreateTopicEnable brokerIP1
honoured flushConsumerOffsetInterval namesrvAddr autoCreateSubscriptionGroup listenPort rejectTransactionMessage
honoured longPollingEnable enablePropertyFilter registerNameServerPeriod transactionTimeOut transactionCheckMax
honoured transactionCheckInterval traceTopicEnable storeReplyMessageEnable recallMessageEnable
honoured enableRetryTopicV2 slaveReadEnable brokerHeartbeatInterval controllerAddr brokerElectionPriority
honoured controllerHeartBeatTimeoutMills
threads sendMessageThreadPoolNums=* putMessageFutureThreadPoolNums=* pullMessageThreadPoolNums=*
threads ackMessageThreadPoolNums=16 processReplyMessageThreadPoolNums=* queryMessageThreadPoolNums=*
threads adminBrokerThreadPoolNums=16 litePullMessageThreadPoolNums=* clientManageThreadPoolNums=32
threads consumerManageThreadPoolNums=32 heartbeatThreadPoolNums=* endTransactionThreadPoolNums=*
threads loadBalanceProcessorThreadPoolNums=32 recoverThreadPoolNums=32 recoverConcurrently=false
threads litePullThreadPoolQueueCapacity=100000 adminBrokerThreadPoolQueueCapacity=10000
threads loadBalanceThreadPoolQueueCapacity=100000 sendThreadPoolQueueCapacity=10000 putThreadPoolQueueCapacity=10000
threads pullThreadPoolQueueCapacity=100000 ackThreadPoolQueueCapacity=100000 replyThreadPoolQueueCapacity=10000
threads queryThreadPoolQueueCapacity=20000 clientManagerThreadPoolQueueCapacity=1000000
threads consumerManagerThreadPoolQueueCapacity=1000000 heartbeatThreadPoolQueueCapacity=50000
threads endTransactionPoolQueueCapacity=100000 brokerFastFailureEnable=true waitTimeMillsInSendQueue=200
threads waitTimeMillsInPullQueue=5000 waitTimeMillsInLitePullQueue=5000 waitTimeMillsInHeartbeatQueue=31000
threads waitTimeMillsInTransactionQueue=3000 waitTimeMillsInAdminBrokerQueue=5000 waitTimeMillsInAckQueue=3000
threads asyncSendEnable=true
one-copy brokerIP2=* sendHeartbeatTimeoutMillis=1000 syncBrokerMemberGroupPeriod=1000
one-copy brokerNotActiveTimeoutMillis=10000 enableSlaveActingMaster=false
one-copy enableRemoteEscape=false skipPreOnline=false lockInStrictMode=false
one-copy fetchControllerAddrByDnsLookup=false syncBrokerMetadataPeriod=5000 checkSyncStateSetPeriod=5000
one-copy syncControllerMetadataPeriod=10000
one-copy forwardTimeout=3000 compatibleWithOldNameSrv=true
pop reviveQueueNum=8 reviveInterval=1000 popCkStayBufferTime=10000 popCkStayBufferTimeOut=3000
pop popPollingMapSize=100000 reviveScanTime=10000 reviveMaxSlow=3 popPollingSize=1024 enablePopBufferMerge=false
pop popCkMaxBufferSize=200000 popCkOffsetMaxQueueSize=20000 enablePopBatchAck=false enableSkipLongAwaitingAck=false
pop reviveAckWaitMs=180000 enablePopLog=false popFromRetryProbability=20 popConsumerFSServiceInit=true
pop popConsumerKVServiceLog=false popConsumerKVServiceInit=false popConsumerKVServiceEnable=false
pop popReviveMaxReturnSizePerRead=16384 popReviveMaxAttemptTimes=16 popLongPollingForceNotifyInterval=800
pop enableNotifyBeforePopCalculateLag=true enableNotifyAfterPopOrderLockRelease=true
pop initPopOffsetByCheckMsgInMem=true retrieveMessageFromPopRetryTopicV1=true
pop popResponseReturnActualRetryTopic=false popInflightMessageThreshold=10000 enablePopMessageThreshold=false
pop skipWhenCKRePutReachMaxTimes=false appendAckAsync=false appendCkAsync=false defaultPopShareQueueNum=-1
pop defaultMessageRequestMode=PULL
registration registerBrokerTimeoutMills=24000 compressedRegister=false forceRegister=true
registration enableSingleTopicRegister=false enableSplitRegistration=false splitRegistrationSize=800
registration loadBalancePollNameServerInterval=30000 cleanOfflineBrokerInterval=30000
registration updateNameServerAddrPeriod=120000 fetchNamesrvAddrInterval=10000
reads transferMsgByHeap=true consumerFallbehindThreshold=17179869184 disableConsumeIfConsumerReadSlowly=false
reads litePullMessageEnable=true shortPollingTimeMills=1000 enableNetWorkFlowControl=false
reads coldCtrStrategyEnable=false usePIDColdCtrStrategy=true cgColdReadThreshold=3145728
reads globalColdReadThreshold=104857600
filter enableCalcFilterBitMap=false expectConsumerNumUseFilter=32 maxErrorRateOfBloomFilter=20
filter filterDataCleanTimeSpan=86400000 filterSupportRetry=false
statistics commercialBaseCount=1 commercialSizePerMsg=4096 accountStatsEnable=true accountStatsPrintZeroValues=true
statistics maxStatsIdleTimeInMinutes=-1 enableDetailStat=true autoDeleteUnusedStats=true isolateLogEnable=false
honoured metricsExporterType metricsPromExporterPort metricsPromExporterHost metricsLabel
statistics metricsOtelCardinalityLimit=50000 metricsGrpcExporterTarget=
statistics metricsGrpcExporterHeader= metricGrpcExporterTimeOutInMills=3000 metricGrpcExporterIntervalInMills=60000
statistics metricLoggingExporterIntervalInMills=10000 metricsInDelta=false estimateAccumulation=true
statistics transactionMetricFlushInterval=3000 enableLmqStats=false printChannelGroups=false
statistics printChannelGroupsMinNum=5
trace traceOn=true regionId=DefaultRegion msgTraceTopicName=RMQ_SYS_TRACE_TOPIC
balance serverLoadBalancerEnable=true notifyConsumerIdsChangedEnable=true realTimeNotifyConsumerChange=true
balance enableFastChannelEventProcess=false channelExpiredTimeout=120000 subscriptionExpiredTimeout=600000
balance enableRegisterProducer=true
offsets flushConsumerOffsetHistoryInterval=60000 consumerOffsetUpdateVersionStep=500
offsets delayOffsetUpdateVersionStep=200 useServerSideResetOffset=true enableBroadcastOffsetStore=true
offsets broadcastOffsetExpireSecond=120 broadcastOffsetExpireMaxSecond=300
topics clusterTopicEnable=true brokerTopicEnable=true validateSystemTopicWhenUpdateTopic=true
topics useStaticSubscription=false enableMixedMessageType=false clearRetryTopicWhenDeleteTopic=true
topics enableCreateSysGroup=true allowRecallWhenBrokerNotWriteable=true
transactions transactionOpMsgMaxSize=4096 transactionOpBatchInterval=3000
place brokerConfigPath= rocketmqHome=*
internal highSpeedMode=false configManagerVersion=v1
refused aclEnable startAcceptSendRequestTimeStamp messageStorePlugIn rejectPullConsumerEnable enableControllerMode
refused fetchNamesrvAddrByAddressServer fetchNameSrvAddrByDnsLookup configBlackList

BrokerIdentity:
honoured brokerName brokerClusterName
refused brokerId
container inBrokerContainer=false
no-setter isBrokerContainer=false

MessageStoreConfig:
honoured mappedFileSizeCommitLog flushIntervalCommitLog maxMessageSize deleteWhen diskMaxUsedSpaceRatio
honoured fileReservedTime flushDiskType syncFlushTimeout messageDelayLevel storePathRootDir
honoured diskSpaceWarningLevelRatio timerWheelEnable timerMaxDelaySec diskSpaceCleanForciblyRatio
honoured cleanFileForciblyEnable haListenPort haTransferBatchSize slaveTimeout haMaxTimeSlaveNotCatchup
honoured haFlowControlEnable maxHaTransferByteInSecond
log debugLockEnable=false osPageCacheBusyTimeOutMills=1000 diskFallRecorded=true warmMapedFileEnable=false
log putMsgIndexHightWater=600000 checkCRCOnRecover=true flushCommitLogLeastPages=4
log flushCommitLogThoroughInterval=10000 flushCommitLogTimed=true flushLeastPagesWhenWarmMapedFile=4096
log transientStorePoolEnable=false transientStorePoolSize=5 commitIntervalCommitLog=200
log fastFailIfNoBufferInStorePool=false useReentrantLockWhenPutMessage=true commitCommitLogLeastPages=4
log commitCommitLogThoroughInterval=200 wakeCommitWhenPutMessage=true wakeFlushWhenPutMessage=false
log maxAsyncPutMessageRequests=5000 maxRecoveryCommitlogFiles=30 putMessageTimeout=8000 mappedFileSwapEnable=true
log commitLogForceSwapMapInterval=43200000 commitLogSwapMapReserveFileNum=100 commitLogSwapMapInterval=3600000
log cleanSwapedMapInterval=300000 maxChecksumRange=1073741824 useABSLock=false topicQueueLockNum=32
log spinLockCollisionRetreatOptimalDegree=1000 readUnCommitted=false autoMessageVersionOnTopicLen=true
log maxTopicLength=127
room cleanResourceInterval=10000 deleteCommitLogFilesInterval=100 deleteConsumeQueueFilesInterval=100
room destroyMapedFileIntervalForcibly=120000 redeleteHangedFileInterval=120000 maxBatchDeleteFilesNum=50
room deleteFileBatchMax=10 logicalDiskSpaceCleanForciblyThreshold=0.8
room replicasPerDiskPartition=1
queues mappedFileSizeConsumeQueue=6000000 enableConsumeQueueExt=false mappedFileSizeConsumeQueueExt=50331648
queues bitMapLengthConsumeQueueExt=64 flushIntervalConsumeQueue=1000 flushConsumeQueueLeastPages=2
queues flushConsumeQueueThoroughInterval=60000 travelCqFileNumWhenGetMessage=1
queues correctLogicMinOffsetSleepInterval=1 correctLogicMinOffsetForceInterval=300000 messageIndexEnable=true
queues maxHashSlotNum=5000000 maxIndexNum=20000000 messageIndexSafe=false defaultQueryMaxNum=32
queues mapperFileSizeBatchConsumeQueue=13800000 dispatchFromSenderThread=false dispatchCqThreads=10
queues dispatchCqCacheNum=4096 enableAsyncReput=true recheckReputOffsetFromCq=false
queues logicQueueForceSwapMapInterval=43200000 logicQueueSwapMapReserveFileNum=20
queues logicQueueSwapMapInterval=3600000 searchBcqByCacheEnable=true maxConsumeQueueScan=20000
queues sampleCountThreshold=5000 sampleSteps=32 enableBuildConsumeQueueConcurrently=false
queues batchDispatchRequestThreadPoolNums=16 putConsumeQueueDataByFileChannel=true
store compactionMappedFileSize=104857600 compactionCqMappedFileSize=10485760 compactionScheduleInternal=900000
store maxOffsetMapSize=104857600 compactionThreadNum=6 enableCompaction=true storeType=default
store rocksdbCompressionType=lz4 rocksdbCQDoubleWriteEnable=false realTimePersistRocksDBConfig=true
store statRocksDBCQIntervalSec=10 cleanRocksDBDirtyCQIntervalMin=60 memTableFlushIntervalMs=3600000
store enableRocksDBLog=false bottomMostCompressionTypeForConsumeQueueStore=zstd rocksdbFlushWalFrequency=1024
store rocksdbWalFileRollingThreshold=1073741824 maxLmqConsumeQueueNum=20000 enableBatchPush=false
reads maxTransferBytesOnMessageInMemory=262144 maxTransferCountOnMessageInMemory=32
reads maxTransferBytesOnMessageInDisk=65536 maxTransferCountOnMessageInDisk=8 accessMessageInMemoryMaxRatio=40
reads accessMessageInMemoryHotRatio=26 maxMsgsNumBatch=64 pullBatchMaxMessageCount=160
reads coldDataFlowControlEnable=false coldDataScanEnable=false timerColdDataCheckIntervalMs=60000
reads dataReadAheadEnable=true
filter maxFilterMessageSize=16000
one-copy haSendHeartbeatInterval=5000 haHousekeepingInterval=20000
one-copy haMaxGapNotInSync=268435456 offsetCheckInSlave=false dLegerGroup= dLegerPeers=
one-copy dLegerSelfId= preferredLeaderId=
one-copy syncMasterFlushOffsetWhenStartup=false maxSlaveResendLength=268435456
one-copy syncFromLastFile=false asyncLearner=false storePathDLedgerCommitLog= storePathEpochFile=
one-copy storePathBrokerIdentity=
offsets flushDelayOffsetInterval=10000 enableCleanExpiredOffset=false
timer mappedFileSizeTimerLog=104857600 timerPrecisionMs=1000 timerGetMessageThreadNum=3 timerPutMessageThreadNum=3
timer timerEnableCheckMetrics=true timerSkipUnknownError=false timerEnableRetryUntilSuccess=false
timer timerMetricSmallThreshold=1000000 timerCongestNumEachSlot=2147483647 timerFlushIntervalMs=1000
timer timerRollWindowSlot=172800 timerProgressLogIntervalMs=10000 timerInterceptDelayLevel=false
timer disappearTimeAfterStart=-1 enableScheduleMessageStats=true enableScheduleAsyncDeliver=false
timer scheduleAsyncDeliverMaxPendingLimit=2000 scheduleAsyncDeliverMaxResendNum2Blocked=3
no-setter timerEnableDisruptor=false timerCheckMetricsWhen=05 timerWarmEnable=false timerStopDequeue=false
refused brokerRole haMasterAddress duplicationEnable enableDLegerCommitLog totalReplicas inSyncReplicas
refused minInSyncReplicas allAckInSyncStateSet enableAutoInSyncReplicas storePathCommitLog
refused readOnlyCommitLogStorePaths enableLmq enableMultiDispatch timerStopEnqueue
refused enabledAppendPropCRC forceVerifyPropCRC

NettyServerConfig:
honoured listenPort bindAddress
threads serverWorkerThreads=8 serverSelectorThreads=3 serverCallbackExecutorThreads=0
threads serverNettyWorkerGroupEnable=true
connections serverOnewaySemaphoreValue=256 serverAsyncSemaphoreValue=64 serverChannelMaxIdleTimeSeconds=120
connections serverSocketSndBufSize=0 serverSocketRcvBufSize=0 serverSocketBacklog=1024
connections serverPooledByteBufAllocatorEnable=true useEpollNativeSelector=false writeBufferLowWaterMark=0
connections writeBufferHighWaterMark=0 enableShutdownGracefully=false shutdownWaitTimeSeconds=30

NettyClientConfig:
clients clientCloseSocketIfTimeout=true clientWorkerThreads=4 clientOnewaySemaphoreValue=65535
clients connectTimeoutMillis=3000 clientCallbackExecutorThreads=* channelNotActiveInterval=60000
clients clientAsyncSemaphoreValue=65535 clientChannelMaxIdleTimeSeconds=120 clientSocketSndBufSize=0
clients clientSocketRcvBufSize=0 clientPooledByteBufAllocatorEnable=false writeBufferLowWaterMark=0
clients writeBufferHighWaterMark=0 disableCallbackExecutor=false disableNettyWorkerGroup=false
clients maxReconnectIntervalTimeSeconds=60 enableReconnectForGoAway=true socksProxyConfig={}
clients scanAvailableNameSrv=true
refused useTLS

AuthConfig:
honoured authConfigPath authenticationEnabled initAuthenticationUser innerClientAuthenticationCredentials
honoured authorizationEnabled
users configName=* clusterName=* userCacheMaxNum=1000 userCacheExpiredSecond=600 userCacheRefreshSecond=60
users aclCacheMaxNum=1000 aclCacheExpiredSecond=600 aclCacheRefreshSecond=60
users statefulAuthenticationCacheMaxNum=10000 statefulAuthenticationCacheExpiredSecond=60
users statefulAuthorizationCacheMaxNum=10000 statefulAuthorizationCacheExpiredSecond=60
users authenticationStrategy= authorizationStrategy= authenticationWhitelist= authorizationWhitelist=
acl-v1 migrateAuthFromV1Enabled=false
refused authenticationProvider authenticationMetadataProvider authorizationProvider authorizationMetadataProvider

tieredstore.MessageStoreConfig:
honoured tieredStorageLevel
plug-in recordGetMessageResult=false tieredStoreCommitLogMaxSize=1073741824
plug-in tieredStoreConsumeQueueMaxSize=104857600 tieredStoreIndexFileMaxHashSlotNum=5000000
plug-in tieredStoreIndexFileMaxIndexNum=20000000 tieredMetadataServiceProvider=* tieredBackendServiceProvider=*
plug-in tieredStoreDeleteFileEnable=true tieredStoreFileReservedTime=72 tieredStoreDeleteFileInterval=3600000
plug-in commitLogRollingInterval=24 commitLogRollingMinimumSize=16777216 tieredStoreGroupCommit=true
plug-in tieredStoreGroupCommitTimeout=30000 tieredStoreGroupCommitCount=4096 tieredStoreGroupCommitSize=4194304
plug-in tieredStoreMaxGroupCommitCount=10000 readAheadCacheEnable=true readAheadMessageCountThreshold=4096
plug-in readAheadMessageSizeThreshold=16777216 readAheadCacheExpireDuration=15000
plug-in readAheadCacheSizeThresholdRate=0.3 tieredStoreMaxPendingLimit=10000 tieredStoreCrcCheckEnable=false
plug-in tieredStoreFilePath= objectStoreEndpoint= objectStoreBucket= objectStoreAccessKey= objectStoreSecretKey=

RocketMQ 3 and 4:
honoured mapedFileSizeCommitLog
queues storePathConsumeQueue=* storePathIndex=* mapedFileSizeConsumeQueue=6000000 maxIndexNumPerFile=*
place storeCheckpoint=* abortFile=* storePathDelayOffset=*
threads checkTransactionMessageEnable=* filterServerNums=0 asyncSendThreadPoolNums=*
log flushCommitLogSync=* flushCommitLogMaxPages=*

NamesrvConfig:
honoured orderMessageEnable kvConfigPath returnOrderTopicConfigToBroker scanNotActiveBrokerInterval
honoured enableAllTopicList deleteTopicWithBrokerRegistration
place rocketmqHome=* configStorePath=*
internal productEnvName=center
threads clientRequestThreadPoolNums=8 defaultThreadPoolNums=16 clientRequestThreadPoolQueueCapacity=50000
threads defaultThreadPoolQueueCapacity=10000 unRegisterBrokerQueueCapacity=3000
start needWaitForService=false waitSecondsForService=45
refused clusterTest supportActingMaster notifyMinBrokerIdChanged enableControllerInNamesrv enableTopicList
refused configBlackList

ControllerConfig:
one-copy controllerThreadPoolNums=16 controllerRequestThreadPoolQueueCapacity=50000 controllerDLegerGroup=
one-copy controllerDLegerPeers= controllerDLegerSelfId= mappedFileSize=1073741824 controllerStorePath=*
one-copy enableElectUncleanMaster=false processReadEvent=false notifyBrokerRoleChanged=true
one-copy scanInactiveMasterInterval=5000 controllerType=DLedger jraftConfig=* electMasterMaxRetryCount=3
place rocketmqHome=* configStorePath=*
statistics metricsExporterType=DISABLE metricsGrpcExporterTarget= metricsGrpcExporterHeader=
statistics metricGrpcExporterTimeOutInMills=3000 metricGrpcExporterIntervalInMills=60000
statistics metricLoggingExporterIntervalInMills=10000 metricsPromExporterPort=5557 metricsPromExporterHost=
statistics metricsLabel= metricsInDelta=false
refused configBlackList
honoured scanNotActiveBrokerInterval

a controller's ControllerConfig:
honoured controllerDLegerGroup controllerDLegerPeers controllerDLegerSelfId controllerStorePath
honoured enableElectUncleanMaster notifyBrokerRoleChanged scanNotActiveBrokerInterval controllerType
threads controllerThreadPoolNums=16 controllerRequestThreadPoolQueueCapacity=50000
one-controller mappedFileSize=1073741824 processReadEvent=false scanInactiveMasterInterval=5000
one-controller electMasterMaxRetryCount=3 jraftConfig=*
one-controller jRaftElectionTimeoutMs=1000 jRaftSnapshotIntervalSecs=3600 jRaftGroupId=jRaft-Controller
one-controller jRaftScanWaitTimeoutMs=1000 jRaftServerId=localhost:9880
one-controller jRaftInitConf=localhost:9880,localhost:9881,localhost:9882
one-controller jRaftControllerRPCAddr=localhost:9770,localhost:9771,localhost:9772
place rocketmqHome=* configStorePath=*
statistics metricsExporterType=DISABLE metricsGrpcExporterTarget= metricsGrpcExporterHeader=
statistics metricGrpcExporterTimeOutInMills=3000 metricGrpcExporterIntervalInMills=60000
statistics metricLoggingExporterIntervalInMills=10000 metricsPromExporterPort=5557 metricsPromExporterHost=
statistics metricsLabel= metricsInDelta=false
refused configBlackList

JraftConfig:
one-copy jRaftElectionTimeoutMs=1000 jRaftSnapshotIntervalSecs=3600 jRaftGroupId=jRaft-Controller
one-copy jRaftServerId=localhost:9880 jRaftInitConf=localhost:9880,localhost:9881,localhost:9882
one-copy jRaftControllerRPCAddr=localhost:9770,localhost:9771,localhost:9772 jRaftScanWaitTimeoutMs=1000
"""


class RefusedKey(NamedTuple):
    """Values that promise nothing neve lacks; why any other is refused; the key that, once set, keeps the promise."""

    harmless: tuple[str, ...]
    why: str
    unless: str = ""


_ONE_COPY = "there is one copy, and nothing would be replicated: see replication"
_AUTH = "org.apache.rocketmq.auth"
REFUSED: Mapping[str, RefusedKey] = {
    "brokerRole": RefusedKey(
        ("ASYNC_MASTER", "SLAVE"), "there is one copy: no slave exists to wait for", "replication"
    ),
    "brokerId": RefusedKey(("0",), "a master has id 0, and a controller assigns the other ids", "brokerRole"),
    "haMasterAddress": RefusedKey(("",), _ONE_COPY),
    "duplicationEnable": RefusedKey(("false",), _ONE_COPY),
    "enableDLegerCommitLog": RefusedKey(("false",), _ONE_COPY),
    "enableControllerMode": RefusedKey(("false",), _ONE_COPY, "replication"),
    "totalReplicas": RefusedKey(("1",), _ONE_COPY),
    "inSyncReplicas": RefusedKey(("1",), _ONE_COPY, "replication"),
    "minInSyncReplicas": RefusedKey(("1",), _ONE_COPY, "replication"),
    "allAckInSyncStateSet": RefusedKey(("false",), _ONE_COPY, "replication"),
    "enableAutoInSyncReplicas": RefusedKey(("false",), _ONE_COPY),
    "aclEnable": RefusedKey(
        ("false",),
        "requests would not be authenticated: set authenticationEnabled, authorizationEnabled and create users",
        "authenticationEnabled",
    ),
    "authenticationProvider": RefusedKey(
        ("", f"{_AUTH}.authentication.provider.DefaultAuthenticationProvider"),
        "only RocketMQ's default provider is supported",
    ),
    "authenticationMetadataProvider": RefusedKey(
        ("", f"{_AUTH}.authentication.provider.LocalAuthenticationMetadataProvider"), "users are in authConfigPath"
    ),
    "authorizationProvider": RefusedKey(
        ("", f"{_AUTH}.authorization.provider.DefaultAuthorizationProvider"),
        "only RocketMQ's default provider is supported",
    ),
    "authorizationMetadataProvider": RefusedKey(
        ("", f"{_AUTH}.authorization.provider.LocalAuthorizationMetadataProvider"), "policies are in authConfigPath"
    ),
    "useTLS": RefusedKey(("false",), "requests to other servers would be in plain text: set tlsEnable", "tlsEnable"),
    "rejectPullConsumerEnable": RefusedKey(("false",), "pull consumers would still be served"),
    "configBlackList": RefusedKey(
        (
            "",
            "configBlackList;brokerConfigPath",
            "configBlackList;configStorePath;kvConfigPath",
            "configBlackList;configStorePath",
        ),
        "the keys that can be changed on a running server are fixed (marked live) and cannot be restricted",
    ),
    "startAcceptSendRequestTimeStamp": RefusedKey(("0",), "sends would be accepted from the start"),
    "messageStorePlugIn": RefusedKey(("",), "plug-ins are not supported; neve's archive is storeUrl", "storeUrl"),
    "storePathCommitLog": RefusedKey(
        ("", "{root}/commitlog"),
        "the log is storePathRootDir/commitlog: choose its disk by storePathRootDir",
    ),
    "readOnlyCommitLogStorePaths": RefusedKey(("",), "the log has one directory; files in these would not be read"),
    "enableLmq": RefusedKey(
        ("false",), "light message queues are not supported: their messages would not be delivered"
    ),
    "enableMultiDispatch": RefusedKey(
        ("false",), "light message queues are not supported: their messages would not be delivered"
    ),
    "timerStopEnqueue": RefusedKey(("false",), "timers would still be accepted"),
    "enabledAppendPropCRC": RefusedKey(("false",), "checksums of properties are not written"),
    "forceVerifyPropCRC": RefusedKey(("false",), "checksums of properties are not verified"),
    "fetchNamesrvAddrByAddressServer": RefusedKey(
        ("false",), "address servers are not supported: set namesrvAddr", "namesrvAddr"
    ),
    "fetchNameSrvAddrByDnsLookup": RefusedKey(
        ("false",), "DNS lookup is not supported: set namesrvAddr", "namesrvAddr"
    ),
    "clusterTest": RefusedKey(("false",), "routes of another environment would be missing"),
    "supportActingMaster": RefusedKey(("false",), "no slave would act for its master"),
    "notifyMinBrokerIdChanged": RefusedKey(("false",), "no slave would act for its master"),
    "enableControllerInNamesrv": RefusedKey(
        ("false",), "the controller has its own file: run `neve namesrv --controller controller.conf`"
    ),
    "enableTopicList": RefusedKey(("true",), "lists of topics would still be returned; enableAllTopicList is honoured"),
}


class Key(NamedTuple):
    """A key of RocketMQ. `reason`: HONOURED, `refused` or a key of REASONS; `default`: None if it varies."""

    name: str
    classes: tuple[str, ...]
    reason: str
    default: str | None


@functools.cache
def keys(classes: tuple[str, ...]) -> Mapping[str, Key]:
    """Return the keys of some classes by name; RocketMQ sets a key in all classes that have it."""
    found: dict[str, Key] = {}
    heading = ""
    for line in filter(None, _TABLE.split("\n")):
        if line.endswith(":"):
            heading = line[:-1]
            continue
        reason, *items = line.split()
        for item in items if heading in classes else ():
            name, _, default = item.partition("=")
            before = found.get(name)
            of = (*before.classes, heading) if before else (heading,)
            found[name] = Key(name, of, reason, None if default == "*" else default)
    return found


def refusal(name: str, value: str, given: Mapping[str, str]) -> str | None:
    """Return why a value of a key is refused, given the other keys; None if it is accepted."""
    rule = REFUSED.get(name)
    if rule is None:
        return None
    root = given.get("storePathRootDir", "~/store")
    if any(_is_same(value, harmless.format(root=root)) for harmless in rule.harmless):
        return None
    is_kept = bool(rule.unless) and given.get(rule.unless, "").lower() not in ("", "false", "none")
    return None if is_kept else rule.why + instead(name)


def _is_same(value: str, harmless: str) -> bool:
    if "/" in harmless:
        return Path(value).expanduser() == Path(harmless).expanduser()
    return value.lower() == harmless.lower() if harmless in ("true", "false") else value == harmless


def warning(key: Key, value: str) -> str | None:
    """Return why the value of a key has no effect; None if it makes no difference."""
    why = REASONS.get(key.reason)
    if why is None or value == key.default:
        return None
    return why.replace("`", "") + instead(key.name)


def instead(name: str) -> str:
    """Return the replacement of a key, as the end of a sentence; empty if there is none."""
    return f"; instead: {INSTEAD[name].replace('`', '')}" if name in INSTEAD else ""
