package org.apache.rocketmq.test.base;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.protocol.admin.OffsetWrapper;
import org.apache.rocketmq.test.client.rmq.RMQNormalProducer;
import org.apache.rocketmq.test.client.rmq.RMQPopClient;
import org.apache.rocketmq.test.util.MQAdminTestUtils;
import org.apache.rocketmq.test.util.MQRandomUtils;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/** Replaces the class of RocketMQ's test module, which starts three brokers: this one uses a broker that runs already. */
public class BaseConf {
    public static final String NAMESRV_ADDR = System.getProperty("namesrv");
    protected static final String BROKER1_NAME = System.getProperty("brokerName");
    protected static final String CLUSTER_NAME = "DefaultCluster";
    protected static List<Object> mqClients = new ArrayList<>();
    protected static Broker brokerController1 = new Broker();

    private static final String BROKER_ADDR = System.getProperty("broker");
    private static final int TIMEOUT_MS = 3000;

    static {
        try {
            MQAdminTestUtils.startAdmin(NAMESRV_ADDR);
        } catch (Exception failed) {
            throw new ExceptionInInitializerError(failed);
        }
    }

    /** The parts of a BrokerController that the tests use. */
    public static class Broker {
        private final BrokerConfig withoutEffect = new BrokerConfig();

        public String getBrokerAddr() {
            return BROKER_ADDR;
        }

        public BrokerConfig getBrokerConfig() {
            return withoutEffect;
        }

        public Orders getConsumerOrderInfoManager() {
            return new Orders();
        }
    }

    /** Asks over the wire what a test reads from the broker's memory. */
    public static class Orders {
        /** A queue is blocked if it has messages that are not acknowledged, and a notification does not report them. */
        public boolean checkBlock(String attempt, String topic, String group, int queue, long invisible) {
            RMQPopClient client = new RMQPopClient();
            DefaultMQAdminExt admin = getAdmin(NAMESRV_ADDR);
            try {
                client.create();
                client.start();
                admin.start();
                boolean reported = client.notification(BROKER_ADDR, topic, group, queue, true, attempt, 0L,
                    System.currentTimeMillis(), TIMEOUT_MS).get(TIMEOUT_MS, TimeUnit.MILLISECONDS);
                OffsetWrapper offsets = admin.examineConsumeStats(group, topic).getOffsetTable()
                    .get(new MessageQueue(topic, BROKER1_NAME, queue));
                return !reported && offsets.getConsumerOffset() < offsets.getBrokerOffset();
            } catch (Exception failed) {
                throw new IllegalStateException(failed);
            } finally {
                client.shutdown();
                admin.shutdown();
            }
        }
    }

    public static String initConsumerGroup() {
        String group = MQRandomUtils.getRandomConsumerGroup();
        MQAdminTestUtils.createSub(NAMESRV_ADDR, CLUSTER_NAME, group);
        return group;
    }

    public static DefaultMQAdminExt getAdmin(String namesrv) {
        DefaultMQAdminExt admin = new DefaultMQAdminExt(TIMEOUT_MS);
        admin.setInstanceName(MQRandomUtils.getRandomConsumerGroup());
        admin.setNamesrvAddr(namesrv);
        admin.setPollNameServerInterval(100);
        return admin;
    }

    public static RMQNormalProducer getProducer(String namesrv, String topic) {
        return new RMQNormalProducer(namesrv, topic, false);
    }

    /** The process ends with the tests. */
    public static void shutdown() {
    }
}
