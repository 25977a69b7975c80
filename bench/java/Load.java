import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.LongAdder;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;

/**
 * Load produce NAMESRV TOPIC SIZE IN_FLIGHT WARM_S SECONDS: so many threads that send and wait, as applications do.
 * Load consume NAMESRV TOPIC COUNT: a push consumer of a new group that reads COUNT messages from the first offset on.
 * Prints MARK, nanoseconds, messages so far: once when warm and once at the end. The broker's CPU is read at the marks.
 */
public class Load {
    public static void main(String[] args) throws Exception {
        if (args[0].equals("produce")) produce(args);
        else consume(args);
        System.exit(0);
    }

    private static void produce(String[] args) throws Exception {
        byte[] body = new byte[Integer.parseInt(args[3])];
        java.util.Arrays.fill(body, (byte) 'x');
        DefaultMQProducer producer = new DefaultMQProducer("bench_producer");
        producer.setNamesrvAddr(args[1]);
        producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        producer.start();
        LongAdder sent = new LongAdder(), failed = new LongAdder();
        List<Thread> threads = new ArrayList<>();
        for (int i = 0; i < Integer.parseInt(args[4]); i++) {
            Thread thread = new Thread(() -> {
                while (!Thread.currentThread().isInterrupted()) {
                    try {
                        producer.send(new Message(args[2], body));
                        sent.increment();
                    } catch (InterruptedException end) {
                        return;
                    } catch (Exception error) {
                        failed.increment();
                    }
                }
            });
            thread.setDaemon(true);
            threads.add(thread);
            thread.start();
        }
        Thread.sleep((long) (1000 * Double.parseDouble(args[5])));
        mark(sent.sum());
        Thread.sleep((long) (1000 * Double.parseDouble(args[6])));
        mark(sent.sum());
        System.out.println("FAILED " + failed.sum());
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }

    /** Warm is a fifth of the messages; the end is short of the last, so that the rate is not that of an empty queue. */
    private static void consume(String[] args) throws Exception {
        long count = Long.parseLong(args[3]), warm = count / 5, end = count * 19 / 20;
        AtomicLong got = new AtomicLong();
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("bench_consumer_" + System.nanoTime());
        consumer.setNamesrvAddr(args[1]);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(args[2], "*");
        Object done = new Object();
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            long before = got.getAndAdd(messages.size()), now = before + messages.size();
            if (before < warm && now >= warm) mark(now);
            if (before < end && now >= end) {
                mark(now);
                synchronized (done) { done.notifyAll(); }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        synchronized (done) {
            consumer.start();
            while (got.get() < end) done.wait(120_000);
        }
        Runtime.getRuntime().halt(0);
    }

    private static void mark(long count) {
        System.out.println("MARK " + System.nanoTime() + " " + count);
        System.out.flush();
    }
}
