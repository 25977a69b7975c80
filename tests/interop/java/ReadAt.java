import java.io.PrintStream;
import java.util.Base64;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * ReadAt NAMESRV GROUP TOPIC BROKER_ID COUNT SECONDS: a pull consumer from the first offset that pulls from the brokers of this id alone,
 * until COUNT messages were taken or SECONDS passed. One line for each: GOT, queue, offset, base64 of the body. Then DONE.
 */
public class ReadAt {
    /** The client's loggers may take System.out for their own; what the test reads has this one for itself. */
    private static final PrintStream OUT = System.out;

    public static void main(String[] args) throws Exception {
        System.setOut(System.err);
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(args[1]);
        consumer.setNamesrvAddr(args[0]);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setAutoCommitIntervalMillis(1_000);
        consumer.start();
        consumer.setDefaultBrokerId(Long.parseLong(args[3]));
        consumer.setConnectBrokerByUser(true);
        consumer.subscribe(args[2], "*"); // from here on it pulls
        int left = Integer.parseInt(args[4]);
        long until = System.nanoTime() + Long.parseLong(args[5]) * 1_000_000_000;
        while (left > 0 && System.nanoTime() < until) for (MessageExt message : consumer.poll(1_000)) {
            OUT.println("GOT\t" + message.getQueueId() + "\t" + message.getQueueOffset() + "\t" + Base64.getEncoder().encodeToString(message.getBody()));
            left--;
        }
        consumer.commitSync(); // 4.x has no commit()
        consumer.shutdown();
        OUT.println("DONE");
        System.exit(0);
    }
}
