import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Produce NAMESRV TOPIC MODE COUNT PREFIX: MODE is sync, async, oneway, batch, or queued (all of a key to one queue, in order).
 * One line for each acknowledged send: SENT, status, queue, offset, unique id, base64 of the body. The last line is DONE.
 */
public class Produce {
    /** The client's loggers may take System.out for their own; what the test reads has this one for itself. */
    private static final PrintStream OUT = System.out;
    private static final int BATCH = 8;

    public static void main(String[] args) throws Exception {
        System.setOut(System.err);
        String topic = args[1], mode = args[2], prefix = args[4];
        int count = Integer.parseInt(args[3]);
        DefaultMQProducer producer = new DefaultMQProducer("interop_" + mode);
        producer.setNamesrvAddr(args[0]);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        switch (mode) {
            case "sync":
                for (int i = 0; i < count; i++) {
                    Message message = message(topic, prefix, i);
                    report(producer.send(message), message);
                }
                break;
            case "async":
                async(producer, topic, prefix, count);
                break;
            case "oneway":
                for (int i = 0; i < count; i++) producer.sendOneway(message(topic, prefix, i));
                break;
            case "batch":
                batch(producer, topic, prefix, count);
                break;
            case "queued":
                for (int i = 0; i < count; i++) {
                    Message message = message(topic, prefix, i);
                    report(producer.send(message, Produce::select, i % 4), message);
                }
                break;
            default:
                throw new IllegalArgumentException(mode);
        }
        producer.shutdown();
        OUT.println("DONE");
        System.exit(0);
    }

    private static MessageQueue select(List<MessageQueue> queues, Message message, Object key) {
        return queues.get((Integer) key % queues.size());
    }

    /** Every tenth body is long enough for the client to compress it; tags and keys go round. */
    private static Message message(String topic, String prefix, int i) {
        StringBuilder text = new StringBuilder(prefix + "-" + i + " grüße");
        if (i % 10 == 9) for (int k = 0; k < 1500; k++) text.append(" lorem");
        Message message = new Message(topic, i % 2 == 0 ? "even" : "odd", prefix + "-key-" + i, text.toString().getBytes(StandardCharsets.UTF_8));
        message.putUserProperty("colour", i % 3 == 0 ? "red" : "blue");
        message.setFlag(i);
        return message;
    }

    private static void async(DefaultMQProducer producer, String topic, String prefix, int count) throws Exception {
        CountDownLatch answers = new CountDownLatch(count);
        for (int i = 0; i < count; i++) {
            Message message = message(topic, prefix, i);
            producer.send(message, new SendCallback() {
                @Override public void onSuccess(SendResult result) {
                    report(result, message);
                    answers.countDown();
                }
                @Override public void onException(Throwable error) {
                    OUT.println("FAILED\t" + error);
                    answers.countDown();
                }
            });
        }
        if (!answers.await(30, TimeUnit.SECONDS)) OUT.println("FAILED\tno answer to " + answers.getCount());
    }

    private static void batch(DefaultMQProducer producer, String topic, String prefix, int count) throws Exception {
        for (int i = 0; i < count; i += BATCH) {
            List<Message> messages = new ArrayList<>();
            for (int k = i; k < Math.min(i + BATCH, count); k++) messages.add(message(topic, prefix, k));
            SendResult result = producer.send(messages);
            String[] ids = result.getMsgId().split(",");
            if (ids.length != messages.size()) OUT.println("FAILED\t" + ids.length + " ids for " + messages.size() + " messages");
            for (int k = 0; k < messages.size(); k++) line(result, ids[k % ids.length], result.getQueueOffset() + k, messages.get(k));
        }
    }

    private static void report(SendResult result, Message message) {
        line(result, result.getMsgId(), result.getQueueOffset(), message);
    }

    private static synchronized void line(SendResult result, String id, long offset, Message message) {
        String body = Base64.getEncoder().encodeToString(message.getBody());
        OUT.println("SENT\t" + result.getSendStatus() + "\t" + result.getMessageQueue().getQueueId() + "\t" + offset + "\t" + id + "\t" + body);
    }
}
