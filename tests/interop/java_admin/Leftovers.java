import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.rocketmq.auth.config.AuthConfig;
import org.apache.rocketmq.broker.out.BrokerOuterAPI;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageClientExt;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.protocol.body.BrokerStatsData;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * Leftovers NAMESRV BROKER TOPIC: what a slave and an administrator may ask that mqadmin has no verb for. Lines: OFFSETS, DELAYS,
 * GIVEN-UP, COMMITTED, LATENCY with what came, then DONE.
 */
public class Leftovers {
    private static final PrintStream OUT = System.out;

    public static void main(String[] args) throws Exception {
        System.setOut(System.err);
        String namesrv = args[0], broker = args[1], topic = args[2];
        DefaultMQAdminExt admin = new DefaultMQAdminExt();
        admin.setNamesrvAddr(namesrv);
        admin.start();
        DefaultMQPullConsumer reader = new DefaultMQPullConsumer("leftovers_reader");
        reader.setNamesrvAddr(namesrv);
        reader.start();
        transaction(namesrv, topic, admin, reader);
        reader.updateConsumeOffset(new MessageQueue(topic, "broker-a", 0), 1);
        reader.getOffsetStore().persist(new MessageQueue(topic, "broker-a", 0));
        BrokerStatsData latency = admin.viewBrokerStatsData(broker, "GROUP_GET_LATENCY", "0@" + topic + "@leftovers_reader");
        OUT.println("LATENCY\t" + latency.getStatsMinute().getSum());
        admin.exportPopRecords(broker, 5_000);
        slave(broker);
        OUT.println("DONE");
        System.exit(0);
    }

    /** Nobody answers the only question, so the broker gives it up; put back, the next question is answered. */
    private static void transaction(String namesrv, String topic, DefaultMQAdminExt admin, DefaultMQPullConsumer reader) throws Exception {
        AtomicBoolean answers = new AtomicBoolean();
        TransactionMQProducer producer = new TransactionMQProducer("leftovers_producer");
        producer.setNamesrvAddr(namesrv);
        producer.setTransactionListener(new TransactionListener() {
            @Override public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return LocalTransactionState.UNKNOW;
            }
            @Override public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return answers.get() ? LocalTransactionState.COMMIT_MESSAGE : LocalTransactionState.UNKNOW;
            }
        });
        producer.start();
        producer.sendMessageInTransaction(new Message(topic, "kept".getBytes(StandardCharsets.UTF_8)), null);
        MessageExt up = first(reader, new MessageQueue("TRANS_CHECK_MAX_TIME_TOPIC", "broker-a", 0));
        OUT.println("GIVEN-UP\t" + new String(up.getBody(), StandardCharsets.UTF_8));
        answers.set(true);
        if (!admin.resumeCheckHalfMessage(up.getTopic(), ((MessageClientExt) up).getOffsetMsgId())) OUT.println("FAILED\tresume");
        MessageExt committed = first(reader, new MessageQueue(topic, "broker-a", 0));
        OUT.println("COMMITTED\t" + new String(committed.getBody(), StandardCharsets.UTF_8));
        producer.shutdown();
    }

    private static MessageExt first(DefaultMQPullConsumer reader, MessageQueue queue) throws Exception {
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(60);
        while (System.nanoTime() < deadline) {
            try {
                PullResult found = reader.pullBlockIfNotFound(queue, "*", 0, 1);
                if (found.getPullStatus() == PullStatus.FOUND) return found.getMsgFoundList().get(0);
            } catch (Exception notYet) {
                new CountDownLatch(1).await(200, TimeUnit.MILLISECONDS);
            }
        }
        throw new IllegalStateException("nothing in " + queue);
    }

    private static void slave(String broker) throws Exception {
        BrokerOuterAPI api = new BrokerOuterAPI(new NettyClientConfig(), new AuthConfig());
        api.start();
        OUT.println("OFFSETS\t" + api.getAllConsumerOffset(broker).getOffsetTable());
        OUT.println("DELAYS\t" + api.getAllDelayOffset(broker));
        api.shutdown();
    }
}
