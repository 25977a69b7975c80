import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Workers NAMESRV: stock producers and consumers that write down what they do and see, round by round. Lines of stdin:
 * begin PLAIN_TOPIC TRANSACTION_TOPIC GROUP SEED; stop, which ends the sending; end, which ends the consumers. Each is
 * answered by a row with its name when it is done. Other rows:
 * SENT, producer, number, key, topic, began, ended, outcome, queue, offset, offset message id, repeats, decision;
 * SEEN, who, group, topic, queue, offset, key, time, in order, again.
 */
public class Workers {
    private static final PrintStream OUT = System.out;
    private static final String COMMIT = "commit", ROLLBACK = "rollback";
    private static final int PAUSE_MS = 20, LARGEST = 3000, MOST_STARTS = 10;
    /** How each transaction ends, by its key: no entry while its half message is under way. */
    private static final Map<String, String> DECIDED = new ConcurrentHashMap<>();
    private static String namesrv;
    private static volatile boolean sending;
    private static final List<Thread> senders = new ArrayList<>();
    private static final List<DefaultMQPushConsumer> members = new ArrayList<>();

    public static void main(String[] args) {
        try {
            work(args);
        } catch (Throwable error) { // other threads would keep the JVM, and nobody would be told
            error.printStackTrace();
            System.exit(1);
        }
    }

    private static void work(String[] args) throws Exception {
        System.setOut(System.err);
        namesrv = args[0];
        DefaultMQProducer once = prepared(new DefaultMQProducer("java_once"), 0);
        DefaultMQProducer again = prepared(new DefaultMQProducer("java_again"), 2);
        TransactionMQProducer halves = new TransactionMQProducer("java_halves");
        halves.setTransactionListener(new Transactions());
        prepared(halves, 2);
        say("READY");
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] a = line.split("\t", -1);
            switch (a[0]) {
                case "begin": begin(a, once, again, halves); break;
                case "stop": stop(); break;
                case "end":
                    members.parallelStream().forEach(DefaultMQPushConsumer::shutdown);
                    members.clear();
                    break;
                default: throw new IllegalArgumentException(a[0]);
            }
            say(a[0].toUpperCase());
        }
        System.exit(0);
    }

    private static <P extends DefaultMQProducer> P prepared(P producer, int retries) throws MQClientException {
        producer.setNamesrvAddr(namesrv);
        producer.setInstanceName(producer.getProducerGroup());
        producer.setPollNameServerInterval(1_000);
        producer.setHeartbeatBrokerInterval(1_000);
        producer.setMqClientApiTimeout(5_000);
        producer.setSendMsgTimeout(4_000);
        producer.setRetryTimesWhenSendFailed(retries);
        producer.start();
        return producer;
    }

    private static void begin(String[] a, DefaultMQProducer once, DefaultMQProducer again, TransactionMQProducer halves) throws Exception {
        String plain = a[1], transactions = a[2], group = a[3];
        long seed = Long.parseLong(a[4]);
        sending = true;
        senders.add(new Thread(() -> send("java_once", once, plain, 1, seed)));
        senders.add(new Thread(() -> send("java_again", again, plain, -1, seed + 1)));
        senders.add(new Thread(() -> sendHalves(halves, transactions, seed + 2)));
        for (Thread sender : senders) sender.start();
        for (int i = 0; i < 2; i++) members.add(member(group + "_java", "java_" + i, false, plain, transactions));
        members.add(member(group + "_java_order", "java_in_order", true, plain));
    }

    private static void stop() throws InterruptedException {
        sending = false;
        for (Thread sender : senders) sender.join();
        senders.clear();
    }

    // ---- sending

    /** To one queue, or to all in turn. */
    private static void send(String name, DefaultMQProducer producer, String topic, int queue, long seed) {
        Random chance = new Random(seed);
        for (int i = 0; sending; i++) {
            String key = topic + "-" + name + "-" + i;
            Message message = message(topic, key, chance);
            long began = System.currentTimeMillis();
            SendResult result = null;
            Exception error = null;
            try {
                result = queue < 0 ? producer.send(message) : producer.send(message, (queues, m, arg) -> queues.get(queue % queues.size()), null);
            } catch (Exception failed) {
                error = failed;
            }
            sent(name, i, key, topic, began, result, error, queue < 0, "");
            pause();
        }
    }

    private static void sendHalves(TransactionMQProducer producer, String topic, long seed) {
        Random chance = new Random(seed);
        for (int i = 0; sending; i++) {
            String key = topic + "-java_halves-" + i;
            Message message = message(topic, key, chance);
            long began = System.currentTimeMillis();
            SendResult result = null;
            Exception error = null;
            try {
                result = producer.sendMessageInTransaction(message, i);
            } catch (Exception failed) {
                error = failed;
            }
            DECIDED.putIfAbsent(key, ROLLBACK); // the local part was never done
            sent("java_halves", i, key, topic, began, result, error, true, DECIDED.get(key));
            pause();
        }
    }

    /** Of four, two are ended at once and two are left to the check. */
    private static class Transactions implements TransactionListener {
        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object number) {
            int i = (Integer) number;
            DECIDED.put(message.getKeys(), i % 2 == 0 ? COMMIT : ROLLBACK);
            return i % 4 < 2 ? state(message.getKeys()) : LocalTransactionState.UNKNOW;
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            return state(message.getKeys());
        }

        private static LocalTransactionState state(String key) {
            String decided = DECIDED.get(key);
            if (decided == null) return LocalTransactionState.UNKNOW;
            return decided.equals(COMMIT) ? LocalTransactionState.COMMIT_MESSAGE : LocalTransactionState.ROLLBACK_MESSAGE;
        }
    }

    private static Message message(String topic, String key, Random chance) {
        byte[] filler = new byte[chance.nextInt(LARGEST)];
        chance.nextBytes(filler);
        byte[] head = (key + "|").getBytes(StandardCharsets.UTF_8), body = new byte[head.length + filler.length];
        System.arraycopy(head, 0, body, 0, head.length);
        System.arraycopy(filler, 0, body, head.length, filler.length);
        Message message = new Message(topic, body);
        message.setKeys(key);
        return message;
    }

    private static void sent(String name, int number, String key, String topic, long began, SendResult result, Exception error, boolean repeats, String decision) {
        String outcome = result == null ? (isRefusal(error) ? "refused" : "unknown") : result.getSendStatus() == SendStatus.SEND_OK ? "acknowledged" : "refused";
        boolean isThere = result != null && result.getMessageQueue() != null;
        say("SENT\t" + name + "\t" + number + "\t" + key + "\t" + topic + "\t" + began + "\t" + System.currentTimeMillis() + "\t" + outcome + "\t"
            + (isThere ? result.getMessageQueue().getQueueId() : -1) + "\t" + (isThere ? result.getQueueOffset() : -1) + "\t"
            + (isThere && result.getOffsetMsgId() != null ? result.getOffsetMsgId() : "") + "\t" + repeats + "\t" + decision);
    }

    private static boolean isRefusal(Exception error) {
        return error instanceof org.apache.rocketmq.client.exception.MQBrokerException;
    }

    private static void pause() {
        try {
            Thread.sleep(PAUSE_MS);
        } catch (InterruptedException stopped) {
            sending = false;
        }
    }

    // ---- consuming

    /** A name server on a busy machine may not answer in time; then a start fails. */
    private static DefaultMQPushConsumer member(String group, String name, boolean inOrder, String... topics) throws MQClientException {
        for (int i = 1;; i++) {
            try {
                return started(group, name, inOrder, topics);
            } catch (IllegalStateException | MQClientException late) {
                if (i == MOST_STARTS) throw late;
                late.printStackTrace();
            }
        }
    }

    private static DefaultMQPushConsumer started(String group, String name, boolean inOrder, String... topics) throws MQClientException {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setInstanceName(group + name);
        consumer.setNamesrvAddr(namesrv);
        consumer.setMqClientApiTimeout(5_000);
        consumer.setPollNameServerInterval(1_000);
        consumer.setHeartbeatBrokerInterval(1_000);
        consumer.setPersistConsumerOffsetInterval(500);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        for (String topic : topics) consumer.subscribe(topic, "*");
        if (inOrder) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                for (MessageExt message : messages) seen(name, group, message, true);
                return ConsumeOrderlyStatus.SUCCESS;
            });
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                for (MessageExt message : messages) seen(name, group, message, false);
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
        }
        try {
            consumer.start();
        } catch (IllegalStateException | MQClientException late) {
            consumer.shutdown();
            throw late;
        }
        return consumer;
    }

    private static void seen(String name, String group, MessageExt m, boolean inOrder) {
        String body = new String(m.getBody(), StandardCharsets.ISO_8859_1);
        say("SEEN\t" + name + "\t" + group + "\t" + m.getTopic() + "\t" + m.getQueueId() + "\t" + m.getQueueOffset() + "\t"
            + body.substring(0, Math.max(0, body.indexOf('|'))) + "\t" + System.currentTimeMillis() + "\t" + inOrder + "\t" + (m.getReconsumeTimes() > 0));
    }

    private static synchronized void say(String line) {
        OUT.println(line);
        OUT.flush();
    }
}
