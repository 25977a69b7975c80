import java.util.ArrayList;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;
import org.apache.rocketmq.tools.command.CommandUtil;

/**
 * Asks what the RocketMQ driver of the OpenMessaging Benchmark asks (settings of its rocketmq.yaml): topics with
 * queue.type=BatchCQ at each broker of the cluster, producers that batch by themselves, push consumers.
 *
 * Prints the stored attributes of each topic and "SENT n RECEIVED n".
 */
public class Workload {
    private static final String CLUSTER = "DefaultCluster";
    private static final int PARTITIONS = 4;

    public static void main(String[] arguments) throws Exception {
        String namesrv = arguments[0];
        int topics = Integer.parseInt(arguments[1]);
        int each = Integer.parseInt(arguments[2]);
        DefaultMQAdminExt admin = new DefaultMQAdminExt();
        admin.setNamesrvAddr(namesrv);
        admin.setInstanceName("AdminInstance-1");
        admin.start();
        List<String> names = new ArrayList<>();
        for (int number = 0; number < topics; number++) {
            names.add("RocketMQ-Benchmark-" + number);
            create(admin, names.get(number));
        }

        Set<String> distinct = ConcurrentHashMap.newKeySet();
        CountDownLatch all = new CountDownLatch(topics * each);
        List<DefaultMQPushConsumer> consumers = new ArrayList<>();
        for (String name : names) {
            DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("subscription-of-" + name);
            consumer.setNamesrvAddr(namesrv);
            consumer.setInstanceName("ConsumerInstance-" + name);
            consumer.setVipChannelEnabled(false);
            consumer.subscribe(name, "*");
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                for (MessageExt message : messages) {
                    if (distinct.add(message.getTopic() + " " + new String(message.getBody()).trim())) {
                        all.countDown();
                    }
                }
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
            consumer.start();
            consumers.add(consumer);
        }

        DefaultMQProducer producer = new DefaultMQProducer("ProducerGroup_1");
        producer.setNamesrvAddr(namesrv);
        producer.setInstanceName("ProducerInstance-1");
        producer.setVipChannelEnabled(false);
        producer.setAutoBatch(true);
        producer.setEnableBackpressureForAsyncMode(true);
        producer.setBackPressureForAsyncSendNum(1024);
        producer.start();
        CountDownLatch sent = new CountDownLatch(topics * each);
        AtomicInteger stored = new AtomicInteger();
        for (int number = 0; number < each; number++) {
            for (String name : names) {
                Message message = new Message(name, String.format("%-1024d", number).getBytes());
                message.setKeys("key-" + number);
                producer.send(message, new SendCallback() {
                    @Override
                    public void onSuccess(SendResult result) {
                        stored.incrementAndGet();
                        sent.countDown();
                    }

                    @Override
                    public void onException(Throwable failure) {
                        failure.printStackTrace();
                        sent.countDown();
                    }
                });
            }
        }
        sent.await(60, TimeUnit.SECONDS);
        all.await(60, TimeUnit.SECONDS);
        System.out.println("SENT " + stored + " RECEIVED " + distinct.size());
        consumers.forEach(DefaultMQPushConsumer::shutdown);
        producer.shutdown();
        admin.shutdown();
    }

    private static void create(DefaultMQAdminExt admin, String name) throws Exception {
        Set<String> brokers = CommandUtil.fetchMasterAndSlaveAddrByClusterName(admin, CLUSTER);
        TopicConfig config = new TopicConfig();
        config.setTopicName(name);
        config.setOrder(false);
        config.setPerm(6);
        config.setReadQueueNums(Math.max(1, PARTITIONS / brokers.size()));
        config.setWriteQueueNums(Math.max(1, PARTITIONS / brokers.size()));
        config.getAttributes().put("+queue.type", "BatchCQ");
        for (String broker : brokers) {
            admin.createAndUpdateTopicConfig(broker, config);
            System.out.println("TOPIC " + admin.examineTopicConfig(broker, name).getAttributes());
        }
    }
}
