import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
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
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageClientExt;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Agent NAMESRV: one JVM for a whole test run. Each line of stdin is a verb and its arguments, divided by tabs; the answer is
 * some rows and END, or ERROR and why. Verbs: produce, push, pair, lite, key, view, time, admin.
 *
 * A message is a row of all that a consumer can see of it but the moment at which it was consumed:
 * GOT, topic, queue, offset, retries, flag, sysFlag, born time, born host, store time, store host, store size, offset id, unique id,
 * body CRC, half message's place, base64 of its properties (sorted, one a line), base64 of its body.
 */
public class Agent {
    /** The client's loggers may take System.out for their own; what the test reads has this one for itself. */
    private static final PrintStream OUT = System.out;
    private static final int BATCH = 8;
    private static String namesrv;
    private static DefaultMQProducer producer;

    public static void main(String[] args) throws Exception {
        System.setOut(System.err);
        namesrv = args[0];
        producer = new DefaultMQProducer("agent");
        producer.setNamesrvAddr(namesrv);
        producer.setMqClientApiTimeout(30_000);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            try {
                answer(line.split("\t", -1));
                say("END");
            } catch (Throwable error) {
                error.printStackTrace();
                say("ERROR\t" + String.valueOf(error).replace('\n', ' ').replace('\t', ' '));
            }
        }
        System.exit(0);
    }

    private static void answer(String[] a) throws Exception {
        switch (a[0]) {
            case "produce": produce(a[1], a[2], Integer.parseInt(a[3]), a[4]); break;
            case "push": push(a[1], a[2], a[3], a[4], Integer.parseInt(a[5]), Integer.parseInt(a[6])); break;
            case "pair": pair(a[1], a[2], Integer.parseInt(a[3]), Integer.parseInt(a[4])); break;
            case "lite": lite(a[1], a[2], Integer.parseInt(a[3]), Long.parseLong(a[4]), Integer.parseInt(a[5])); break;
            case "key":
                producer.queryMessage(a[1], a[2], Integer.parseInt(a[3]), Long.parseLong(a[4]), Long.parseLong(a[5]))
                    .getMessageList().forEach(message -> got(message));
                break;
            case "view": got(producer.viewMessage(a[1], a[2])); break;
            case "time": say("OFFSET\t" + producer.searchOffset(queue(a[1], Integer.parseInt(a[2])), Long.parseLong(a[3]))); break;
            case "admin": admin(a); break;
            default: throw new IllegalArgumentException(a[0]);
        }
    }

    private static synchronized void say(String line) {
        OUT.println(line);
        OUT.flush();
    }

    private static synchronized void got(MessageExt m) {
        Map<String, String> properties = new TreeMap<>(m.getProperties());
        properties.remove(MessageConst.PROPERTY_CONSUME_START_TIMESTAMP);
        properties.remove(MessageConst.PROPERTY_MIN_OFFSET);
        properties.remove(MessageConst.PROPERTY_MAX_OFFSET);
        StringBuilder text = new StringBuilder();
        properties.forEach((name, value) -> text.append(name).append('=').append(value).append('\n'));
        String place = m instanceof MessageClientExt ? ((MessageClientExt) m).getOffsetMsgId() : m.getMsgId();
        say("GOT\t" + m.getTopic() + "\t" + m.getQueueId() + "\t" + m.getQueueOffset() + "\t" + m.getReconsumeTimes() + "\t" + m.getFlag()
            + "\t" + m.getSysFlag() + "\t" + m.getBornTimestamp() + "\t" + m.getBornHostString() + "\t" + m.getStoreTimestamp()
            + "\t" + m.getStoreHost() + "\t" + m.getStoreSize() + "\t" + place + "\t"
            + m.getProperty(MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX) + "\t" + m.getBodyCRC() + "\t"
            + m.getPreparedTransactionOffset() + "\t" + base64(text.toString().getBytes(StandardCharsets.UTF_8)) + "\t" + base64(m.getBody()));
    }

    private static String base64(byte[] bytes) {
        return Base64.getEncoder().encodeToString(bytes);
    }

    // ---- sending

    /** MODE: plain; batch; queued (in order to the queues in turn); level N; timer MS; transaction (every third is rolled back). */
    private static void produce(String mode, String topic, int count, String prefix) throws Exception {
        String[] words = mode.split(" ");
        if (words[0].equals("batch")) batch(topic, count, prefix);
        else if (words[0].equals("transaction")) transactions(topic, count, prefix);
        else for (int i = 0; i < count; i++) {
            Message message = message(topic, prefix, i);
            if (words[0].equals("level")) message.setDelayTimeLevel(Integer.parseInt(words[1]));
            if (words[0].equals("timer")) MessageAccessor.putProperty(message, "TIMER_DELAY_MS", words[1]);
            if (words[0].equals("queued")) sent(producer.send(message, (queues, m, key) -> queues.get((Integer) key % queues.size()), i), message);
            else sent(producer.send(message), message);
        }
    }

    /** Every tenth body is long enough for the client to compress it; tags and keys go round. */
    private static Message message(String topic, String prefix, int i) {
        StringBuilder text = new StringBuilder(prefix + "-" + i + " grüße");
        if (i % 10 == 9) for (int k = 0; k < 1500; k++) text.append(" lorem");
        Message message = new Message(topic, i % 2 == 0 ? "even" : "odd", prefix + "-key-" + i, text.toString().getBytes(StandardCharsets.UTF_8));
        message.putUserProperty("number", String.valueOf(i));
        message.putUserProperty("colour", i % 3 == 0 ? "red" : "blåu");
        message.setFlag(i);
        return message;
    }

    private static void batch(String topic, int count, String prefix) throws Exception {
        for (int i = 0; i < count; i += BATCH) {
            List<Message> messages = new ArrayList<>();
            for (int k = i; k < Math.min(i + BATCH, count); k++) messages.add(message(topic, prefix, k));
            SendResult result = producer.send(messages);
            for (int k = 0; k < messages.size(); k++) row(result, result.getQueueOffset() + k, messages.get(k));
        }
    }

    private static void transactions(String topic, int count, String prefix) throws Exception {
        TransactionMQProducer sender = new TransactionMQProducer("agent_" + prefix);
        sender.setNamesrvAddr(namesrv);
        sender.setMqClientApiTimeout(30_000);
        sender.setTransactionListener(new TransactionListener() {
            @Override public LocalTransactionState executeLocalTransaction(Message message, Object number) {
                return (Integer) number % 3 == 0 ? LocalTransactionState.ROLLBACK_MESSAGE : LocalTransactionState.COMMIT_MESSAGE;
            }
            @Override public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return LocalTransactionState.UNKNOW;
            }
        });
        sender.start();
        for (int i = 0; i < count; i++) {
            Message message = message(topic, prefix, i);
            SendResult result = sender.sendMessageInTransaction(message, i);
            if (i % 3 != 0) sent(result, message);
        }
        sender.shutdown();
    }

    private static void sent(SendResult result, Message message) {
        row(result, result.getQueueOffset(), message);
    }

    private static void row(SendResult result, long offset, Message message) {
        say("SENT\t" + result.getSendStatus() + "\t" + result.getMessageQueue().getQueueId() + "\t" + offset + "\t" + message.getKeys()
            + "\t" + base64(message.getBody()));
    }

    // ---- consuming

    /** MODE: words out of orderly, broadcast, sql, fail N (a message is refused until it came N times), dead (never retried more than once). */
    private static DefaultMQPushConsumer consumer(String group, String topic, String expression, String mode, Taker taker) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(namesrv);
        consumer.setPollNameServerInterval(1_000); // its retry topic is made by its first heartbeat: the route comes later
        consumer.setMqClientApiTimeout(30_000);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setAwaitTerminationMillisWhenShutdown(10_000);
        if (mode.contains("sql")) consumer.subscribe(topic, MessageSelector.bySql(expression));
        else consumer.subscribe(topic, expression);
        if (mode.contains("broadcast")) broadcast(consumer);
        if (mode.contains("dead")) consumer.setMaxReconsumeTimes(1);
        if (mode.contains("orderly")) consumer.registerMessageListener((MessageListenerOrderly) (messages, context) ->
            taker.take(messages) ? ConsumeOrderlyStatus.SUCCESS : ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT);
        else consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            context.setDelayLevelWhenNextConsume(1);
            return taker.take(messages) ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS : ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        return consumer;
    }

    private interface Taker {
        boolean take(List<MessageExt> messages);
    }

    /** The enum's package is another one in 5.x. */
    @SuppressWarnings({"unchecked", "rawtypes"})
    private static void broadcast(DefaultMQPushConsumer consumer) throws Exception {
        for (Method method : DefaultMQPushConsumer.class.getMethods()) if (method.getName().equals("setMessageModel"))
            method.invoke(consumer, Enum.valueOf((Class) method.getParameterTypes()[0], "BROADCASTING"));
    }

    private static void push(String group, String topic, String expression, String mode, int count, int seconds) throws Exception {
        CountDownLatch wanted = new CountDownLatch(count);
        Map<String, Integer> times = new ConcurrentHashMap<>();
        String[] words = mode.split(" ");
        int refusals = words[0].equals("fail") ? Integer.parseInt(words[1]) : 0;
        DefaultMQPushConsumer consumer = consumer(group, topic, expression, mode, messages -> {
            boolean taken = true;
            for (MessageExt message : messages) {
                got(message);
                wanted.countDown();
                if (times.merge(message.getKeys(), 1, Integer::sum) <= refusals) taken = false;
            }
            return taken;
        });
        consumer.start();
        wanted.await(seconds, TimeUnit.SECONDS);
        consumer.shutdown();
    }

    /** Two members of a group: the second comes when a quarter was consumed, the first goes when three quarters were. */
    private static void pair(String group, String topic, int count, int seconds) throws Exception {
        CountDownLatch quarter = new CountDownLatch(count / 4), most = new CountDownLatch(count * 3 / 4);
        Map<String, Boolean> seen = Collections.synchronizedMap(new TreeMap<>());
        CountDownLatch all = new CountDownLatch(count);
        AtomicInteger bySecond = new AtomicInteger();
        List<DefaultMQPushConsumer> members = new ArrayList<>();
        for (int number = 0; number < 2; number++) {
            boolean second = number == 1;
            DefaultMQPushConsumer member = consumer(group, topic, "*", "", messages -> {
                for (MessageExt message : messages) {
                    got(message);
                    if (second) bySecond.incrementAndGet();
                    if (seen.putIfAbsent(message.getQueueId() + "/" + message.getQueueOffset(), true) == null) {
                        quarter.countDown();
                        most.countDown();
                        all.countDown();
                    }
                }
                try {
                    Thread.sleep(2); // slow enough for the group to change while there is something left
                } catch (InterruptedException stopped) {
                    return false;
                }
                return true;
            });
            member.setInstanceName(group + number);
            member.setPullBatchSize(8);
            member.setPullThresholdForQueue(16);
            member.setConsumeThreadMin(2);
            member.setConsumeThreadMax(2);
            members.add(member);
        }
        members.get(0).start();
        quarter.await(seconds, TimeUnit.SECONDS);
        members.get(1).start();
        most.await(seconds, TimeUnit.SECONDS);
        members.get(0).shutdown();
        all.await(seconds, TimeUnit.SECONDS);
        members.get(1).shutdown();
        say("SECOND\t" + bySecond.get());
    }

    private static MessageQueue queue(String topic, int id) throws Exception {
        for (MessageQueue queue : producer.fetchPublishMessageQueues(topic)) if (queue.getQueueId() == id) return queue;
        throw new IllegalStateException("no queue " + id + " of " + topic);
    }

    private static void lite(String group, String topic, int queue, long offset, int count) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(group);
        consumer.setNamesrvAddr(namesrv);
        consumer.setMqClientApiTimeout(30_000);
        consumer.setAutoCommit(false);
        consumer.start();
        MessageQueue place = queue(topic, queue);
        consumer.assign(Collections.singletonList(place));
        int taken = 0;
        for (int empty = 0; taken < count && empty < 10; ) {
            // The pull that assign() began can take a seek's offset and then see that it is cancelled: that seek is lost in the client.
            if (taken == 0) consumer.seek(place, offset);
            List<MessageExt> messages = consumer.poll(2_000);
            empty = messages.isEmpty() ? empty + 1 : 0;
            for (MessageExt message : messages) if (taken++ < count) got(message);
        }
        consumer.shutdown();
    }

    // ---- mqadmin

    /** What the stock admin tool prints, as base64. */
    private static void admin(String[] a) throws Exception {
        List<String> arguments = new ArrayList<>();
        for (int i = 1; i < a.length; i++) arguments.add(a[i]);
        Collections.addAll(arguments, "-n", namesrv);
        ByteArrayOutputStream text = new ByteArrayOutputStream();
        PrintStream before = System.out;
        System.setOut(new PrintStream(text, true, "UTF-8"));
        try {
            org.apache.rocketmq.tools.command.MQAdminStartup.main0(arguments.toArray(new String[0]), null);
        } finally {
            System.setOut(before);
        }
        say("TEXT\t" + base64(text.toByteArray()));
    }
}
