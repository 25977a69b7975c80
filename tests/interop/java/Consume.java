import java.io.PrintStream;
import java.util.Base64;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Consume NAMESRV GROUP TOPIC EXPRESSION MODE COUNT SECONDS: a push consumer from the first offset, until COUNT messages were
 * taken or SECONDS passed. MODE is concurrent, orderly, or retry (each message fails once, and is asked for again after a second).
 * One line for each message: GOT, queue, offset, retries, flag, tags, keys, colour, unique id, base64 of the body. Then DONE.
 */
public class Consume {
    /** The client's loggers may take System.out for their own; what the test reads has this one for itself. */
    private static final PrintStream OUT = System.out;

    public static void main(String[] args) throws Exception {
        System.setOut(System.err);
        String mode = args[4];
        CountDownLatch wanted = new CountDownLatch(Integer.parseInt(args[5]));
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(args[1]);
        consumer.setNamesrvAddr(args[0]);
        consumer.setPollNameServerInterval(1_000); // its retry topic is made by its first heartbeat: the route comes later
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(args[2], args[3]);
        // Without it the client stores its offsets while the listener still returns: the last messages would come again.
        consumer.setAwaitTerminationMillisWhenShutdown(10_000);
        if (mode.equals("orderly")) consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            take(messages, wanted);
            return ConsumeOrderlyStatus.SUCCESS;
        });
        else consumer.registerMessageListener(new Listener(mode.equals("retry"), wanted));
        consumer.start();
        wanted.await(Integer.parseInt(args[6]), TimeUnit.SECONDS);
        consumer.shutdown();
        OUT.println("DONE");
        System.exit(0);
    }

    private static synchronized void take(List<MessageExt> messages, CountDownLatch wanted) {
        for (MessageExt message : messages) {
            String id = message.getProperty(MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX);
            OUT.println("GOT\t" + message.getQueueId() + "\t" + message.getQueueOffset() + "\t" + message.getReconsumeTimes() + "\t" + message.getFlag()
                + "\t" + message.getTags() + "\t" + message.getKeys() + "\t" + message.getProperty("colour") + "\t" + id
                + "\t" + Base64.getEncoder().encodeToString(message.getBody()));
            wanted.countDown();
        }
    }

    private static final class Listener implements MessageListenerConcurrently {
        private final boolean failOnce;
        private final CountDownLatch wanted;
        private final Set<String> seen = ConcurrentHashMap.newKeySet();

        Listener(boolean failOnce, CountDownLatch wanted) {
            this.failOnce = failOnce;
            this.wanted = wanted;
        }

        @Override public ConsumeConcurrentlyStatus consumeMessage(List<MessageExt> messages,
                org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext context) {
            take(messages, wanted);
            boolean failed = false;
            for (MessageExt message : messages) if (failOnce && seen.add(message.getKeys())) failed = true;
            context.setDelayLevelWhenNextConsume(1);
            return failed ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        }
    }
}
