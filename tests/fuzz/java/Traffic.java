import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.RequestCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * Traffic NAMESRV PART [ARGUMENT ...]: one round of what a stock client says, for the recorder between it and the servers. It need
 * not succeed in all it asks; whatever is refused is traffic as well. PART admin takes mqadmin's command lines, one an argument.
 */
public class Traffic {
    private static String namesrv;

    public static void main(String[] args) throws Exception {
        namesrv = args[0];
        switch (args[1]) {
            case "send": send(); break;
            case "transaction": transaction(); break;
            case "reply": reply(); break;
            case "consume": consume("plain", true, false); break;
            case "pop": consume("pop", false, false); break;
            case "orderly": consume("orderly", true, true); break;
            case "poporderly": consume("poporderly", false, true); break;
            case "sql": consume("sql", true, false); break;
            case "broadcast": consume("broadcast", true, false); break;
            case "lite": lite(); break;
            case "admin": admin(args); break;
            default: throw new IllegalArgumentException(args[1]);
        }
        System.exit(0);
    }

    private static DefaultMQProducer producer(String group) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(group);
        producer.setNamesrvAddr(namesrv);
        producer.start();
        return producer;
    }

    private static Message message(int i) {
        StringBuilder text = new StringBuilder("fuzz-" + i);
        if (i % 4 == 3) for (int k = 0; k < 1500; k++) text.append(" lorem");
        Message message = new Message("traffic", i % 2 == 0 ? "even" : "odd", "key-" + i, text.toString().getBytes(StandardCharsets.UTF_8));
        message.putUserProperty("n", "" + i);
        return message;
    }

    private static void send() throws Exception {
        DefaultMQProducer producer = producer("traffic_send");
        for (int i = 0; i < 8; i++) producer.send(message(i));
        producer.sendOneway(message(8));
        List<Message> batch = new ArrayList<>();
        for (int i = 0; i < 3; i++) batch.add(message(i));
        producer.send(batch);
        Message level = message(1);
        level.setDelayTimeLevel(1);
        producer.send(level);
        Message timed = message(2);
        timed.setDelayTimeSec(3600);
        SendResult kept = producer.send(timed);
        attempt(() -> producer.recallMessage("traffic", kept.getRecallHandle()));
        for (MessageQueue queue : producer.fetchPublishMessageQueues("traffic")) {
            attempt(() -> producer.maxOffset(queue));
            attempt(() -> producer.minOffset(queue));
            attempt(() -> producer.searchOffset(queue, 1));
            attempt(() -> producer.earliestMsgStoreTime(queue));
        }
        attempt(() -> producer.queryMessage("traffic", "key-1", 8, 0, Long.MAX_VALUE));
        attempt(() -> producer.viewMessage("traffic", kept.getOffsetMsgId()));
        attempt(() -> producer.createTopic("TBW102", "made", 2, null));
        producer.shutdown();
    }

    private static void transaction() throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer("traffic_transaction");
        producer.setNamesrvAddr(namesrv);
        CountDownLatch checked = new CountDownLatch(1);
        AtomicInteger next = new AtomicInteger();
        producer.setTransactionListener(new TransactionListener() {
            @Override public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return LocalTransactionState.values()[next.getAndIncrement() % 3];
            }
            @Override public LocalTransactionState checkLocalTransaction(MessageExt message) {
                checked.countDown();
                return LocalTransactionState.COMMIT_MESSAGE;
            }
        });
        producer.start();
        for (int i = 0; i < 3; i++) producer.sendMessageInTransaction(message(i), null);
        checked.await(20, TimeUnit.SECONDS);
        Thread.sleep(200);
        producer.shutdown();
    }

    private static void reply() throws Exception {
        DefaultMQProducer producer = producer("traffic_request");
        DefaultMQPushConsumer consumer = consumer("traffic_reply");
        consumer.subscribe("requests", "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) attempt(() -> producer.send(MessageUtil.createReplyMessage(message, "answer".getBytes())));
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        // By callback: the blocking request of 5.3.3 gives up as soon as the request is sent.
        CountDownLatch answered = new CountDownLatch(1);
        producer.request(new Message("requests", "question".getBytes()), new RequestCallback() {
            @Override public void onSuccess(Message message) {
                answered.countDown();
            }
            @Override public void onException(Throwable error) {
                answered.countDown();
            }
        }, 40_000);
        answered.await(40, TimeUnit.SECONDS);
        consumer.shutdown();
        producer.shutdown();
    }

    private static DefaultMQPushConsumer consumer(String group) {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(namesrv);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        return consumer;
    }

    /** The first message fails once. Pop consumers let the broker balance and pop for them. */
    private static void consume(String name, boolean clientRebalance, boolean orderly) throws Exception {
        DefaultMQPushConsumer consumer = consumer("traffic_" + name);
        if (name.equals("broadcast")) consumer.setMessageModel(MessageModel.BROADCASTING);
        if (name.equals("sql")) consumer.subscribe("traffic", MessageSelector.bySql("n BETWEEN 1 AND 5 AND TAGS IS NOT NULL"));
        else consumer.subscribe("traffic", name.equals("plain") ? "even || odd" : "*");
        consumer.setClientRebalance(clientRebalance);
        CountDownLatch wanted = new CountDownLatch(10);
        AtomicInteger taken = new AtomicInteger();
        if (orderly) consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            messages.forEach(message -> wanted.countDown());
            return taken.getAndIncrement() == 0 ? ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT : ConsumeOrderlyStatus.SUCCESS;
        });
        else consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(message -> wanted.countDown());
            context.setDelayLevelWhenNextConsume(1);
            return taken.getAndIncrement() == 0 ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        wanted.await(40, TimeUnit.SECONDS);
        Thread.sleep(6_000);  // the offsets are stored every five seconds
        consumer.shutdown();
    }

    private static void lite() throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("traffic_lite");
        consumer.setNamesrvAddr(namesrv);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.start();
        Collection<MessageQueue> queues = consumer.fetchMessageQueues("traffic");
        consumer.assign(queues);
        for (MessageQueue queue : queues) consumer.seekToBegin(queue);
        for (int i = 0; i < 3; i++) consumer.poll(1_000);
        consumer.commitSync();
        for (MessageQueue queue : queues) attempt(() -> consumer.offsetForTimestamp(queue, 1L));
        for (MessageQueue queue : queues) attempt(() -> consumer.committed(queue));
        consumer.shutdown();
    }

    private static void admin(String[] args) {
        for (int i = 2; i < args.length; i++) MQAdminStartup.main0((args[i] + " -n " + namesrv).split(" "), null);
    }

    private interface Attempt {
        void run() throws Exception;
    }

    private static void attempt(Attempt what) {
        try {
            what.run();
        } catch (Exception error) {
            System.err.println(error);
        }
    }
}
