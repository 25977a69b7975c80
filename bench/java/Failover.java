import java.io.PrintStream;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;

/**
 * Failover NAMESRV TOPIC: a stock producer that sends one message after the other, as an application would, and asks for
 * routes every 3 s. Rows: ACK, when (ms since 1970), offset message id, which names the broker.
 */
public class Failover {
    private static final int PAUSE_MS = 5, ROUTES_EVERY_MS = 3_000;

    public static void main(String[] args) throws Exception {
        PrintStream out = System.out;
        System.setOut(System.err);
        DefaultMQProducer producer = new DefaultMQProducer("failover");
        producer.setNamesrvAddr(args[0]);
        producer.setPollNameServerInterval(ROUTES_EVERY_MS);
        producer.start();
        Message message = new Message(args[1], new byte[100]);
        while (true) {
            try {
                SendResult result = producer.send(message);
                if (result.getSendStatus() == SendStatus.SEND_OK) {
                    out.println("ACK\t" + System.currentTimeMillis() + "\t" + result.getOffsetMsgId());
                    out.flush();
                }
            } catch (InterruptedException end) {
                return;
            } catch (Exception error) {
                System.err.println(error);
            }
            Thread.sleep(PAUSE_MS);
        }
    }
}
