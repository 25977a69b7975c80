package org.apache.rocketmq.test.base;

import java.util.HashMap;
import org.apache.rocketmq.common.attribute.CQType;
import org.apache.rocketmq.common.attribute.TopicMessageType;
import org.apache.rocketmq.test.util.MQAdminTestUtils;

/** Replaces the class of RocketMQ's test module, which starts servers. */
public class IntegrationTestBase {
    public static boolean initTopic(
            String topic, String namesrv, String cluster, int queues, CQType queueType, TopicMessageType messageType) {
        return MQAdminTestUtils.createTopic(namesrv, BaseConf.CLUSTER_NAME, topic, queues, new HashMap<>(), 30);
    }
}
