import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Steady NAMESRVS TOPIC GROUP: a producer and two push consumers of one group at work while servers come and go. Rows:
 * ACK, number, broker, queue, offset for each acknowledged message; NACK, number, why for one that wasn't; GOT, number, broker, queue,
 * offset for each that a consumer was given. A line on stdin ends the sending: STOPPED is said after the last ACK. The end of stdin
 * ends the consumers: DONE.
 */
public class Steady {
    private static final PrintStream OUT = System.out;
    private static volatile boolean sending = true;

    public static void main(String[] args) throws Exception {
        System.setOut(System.err);
        DefaultMQProducer producer = new DefaultMQProducer("steady_producer");
        producer.setNamesrvAddr(args[0]);
        producer.setMqClientApiTimeout(30_000);
        producer.setPollNameServerInterval(1_000);
        producer.setHeartbeatBrokerInterval(1_000);
        producer.setRetryTimesWhenSendFailed(5);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        DefaultMQPushConsumer[] members = {member(args, 0), member(args, 1)};
        Thread sender = new Thread(() -> send(producer, args[1]));
        sender.start();
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        in.readLine();
        sending = false;
        sender.join();
        say("STOPPED");
        while (in.readLine() != null) continue;
        for (DefaultMQPushConsumer member : members) member.shutdown();
        producer.shutdown();
        say("DONE");
        System.exit(0);
    }

    private static DefaultMQPushConsumer member(String[] args, int number) throws MQClientException {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(args[2]);
        consumer.setInstanceName("member" + number);
        consumer.setNamesrvAddr(args[0]);
        consumer.setMqClientApiTimeout(30_000);
        consumer.setPollNameServerInterval(1_000);
        consumer.setHeartbeatBrokerInterval(1_000);
        consumer.setPersistConsumerOffsetInterval(1_000);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(args[1], "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt m : messages) say("GOT\t" + m.getKeys() + "\t" + m.getBrokerName() + "\t" + m.getQueueId() + "\t" + m.getQueueOffset());
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        return consumer;
    }

    private static void send(DefaultMQProducer producer, String topic) {
        for (int i = 0; sending; i++) {
            Message message = new Message(topic, "steady", String.valueOf(i), ("body " + i).getBytes(StandardCharsets.UTF_8));
            try {
                SendResult result = producer.send(message);
                if (result.getSendStatus() != SendStatus.SEND_OK) say("NACK\t" + i + "\t" + result.getSendStatus());
                else say("ACK\t" + i + "\t" + result.getMessageQueue().getBrokerName() + "\t" + result.getMessageQueue().getQueueId() + "\t" + result.getQueueOffset());
                Thread.sleep(5);
            } catch (InterruptedException stopped) {
                return;
            } catch (Exception error) {
                say("NACK\t" + i + "\t" + String.valueOf(error).replace('\n', ' ').replace('\t', ' '));
            }
        }
    }

    private static synchronized void say(String line) {
        OUT.println(line);
        OUT.flush();
    }
}
