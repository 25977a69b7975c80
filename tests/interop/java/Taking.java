import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Taking NAMESRVS GROUP TOPIC...: a push consumer that would begin with what comes last, were there no position. READY, then
 * GOT, topic, broker, queue, offset, retries, body for each message. The end of stdin ends it: DONE.
 */
public class Taking {
    private static final PrintStream OUT = System.out;

    public static void main(String[] args) throws Exception {
        System.setOut(System.err);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(args[1]);
        consumer.setNamesrvAddr(args[0]);
        consumer.setMqClientApiTimeout(30_000);
        consumer.setPollNameServerInterval(1_000);
        consumer.setHeartbeatBrokerInterval(1_000);
        consumer.setPersistConsumerOffsetInterval(1_000);
        consumer.setPullBatchSize(256);
        consumer.setConsumeMessageBatchMaxSize(64);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET);
        for (int at = 2; at < args.length; at++) consumer.subscribe(args[at], "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            StringBuilder rows = new StringBuilder();
            for (MessageExt one : messages) {
                rows.append("GOT\t").append(one.getTopic()).append('\t').append(context.getMessageQueue().getBrokerName());
                rows.append('\t').append(one.getQueueId()).append('\t').append(one.getQueueOffset());
                rows.append('\t').append(one.getReconsumeTimes());
                rows.append('\t').append(new String(one.getBody(), StandardCharsets.UTF_8)).append('\n');
            }
            synchronized (OUT) {
                OUT.print(rows);
                OUT.flush();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        OUT.println("READY");
        OUT.flush();
        while (System.in.read() >= 0) continue;
        consumer.shutdown();
        OUT.println("DONE");
        OUT.flush();
        System.exit(0);
    }
}
