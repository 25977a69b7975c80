import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.AckCallback;
import org.apache.rocketmq.client.consumer.AckResult;
import org.apache.rocketmq.client.consumer.PopCallback;
import org.apache.rocketmq.client.consumer.PopResult;
import org.apache.rocketmq.client.impl.MQClientAPIImpl;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.protocol.header.AckMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.ChangeInvisibleTimeRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.ExtraInfoUtil;
import org.apache.rocketmq.remoting.protocol.header.PopMessageRequestHeader;

/**
 * Pop NAMESRV BROKER ADDRESS: the stock client's pop calls, one line of stdin each, divided by tabs; the answer is some rows and END,
 * or ERROR and why.
 *
 * pop GROUP TOPIC COUNT INVISIBLE_MS POLL_MS   POPPED, topic, queue, offset, retries, key, born time, unique id, handle, base64 of the body
 * ack GROUP TOPIC HANDLE                       ACKED, status
 * hide GROUP TOPIC HANDLE INVISIBLE_MS         HIDDEN, status, the new handle
 */
public class Pop {
    private static final PrintStream OUT = System.out;
    private static final long TIMEOUT = 20_000;
    private static String broker, address;
    private static MQClientAPIImpl api;

    public static void main(String[] args) throws Exception {
        System.setOut(System.err);
        broker = args[1];
        address = args[2];
        DefaultMQProducer client = new DefaultMQProducer("pop");
        client.setNamesrvAddr(args[0]);
        client.setMqClientApiTimeout(30_000);
        client.start();
        api = client.getDefaultMQProducerImpl().getMqClientFactory().getMQClientAPIImpl();
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            try {
                String[] a = line.split("\t", -1);
                List<String> rows = a[0].equals("pop") ? pop(a[1], a[2], Integer.parseInt(a[3]), Long.parseLong(a[4]), Long.parseLong(a[5]))
                    : a[0].equals("ack") ? ack(a[1], a[2], a[3]) : hide(a[1], a[2], a[3], Long.parseLong(a[4]));
                for (String row : rows) OUT.println(row);
                OUT.println("END");
            } catch (Throwable error) {
                error.printStackTrace();
                OUT.println("ERROR\t" + String.valueOf(error).replace('\n', ' ').replace('\t', ' '));
            }
            OUT.flush();
        }
        System.exit(0);
    }

    private static List<String> pop(String group, String topic, int count, long invisible, long poll) throws Exception {
        PopMessageRequestHeader header = new PopMessageRequestHeader();
        header.setConsumerGroup(group);
        header.setTopic(topic);
        header.setQueueId(-1);
        header.setMaxMsgNums(count);
        header.setInvisibleTime(invisible);
        header.setPollTime(poll);
        header.setBornTime(System.currentTimeMillis());
        header.setInitMode(0);
        header.setExpType("TAG");
        header.setExp("*");
        header.setOrder(false);
        CompletableFuture<PopResult> answer = new CompletableFuture<>();
        api.popMessageAsync(broker, address, header, TIMEOUT, new PopCallback() {
            @Override public void onSuccess(PopResult result) {
                answer.complete(result);
            }
            @Override public void onException(Throwable error) {
                answer.completeExceptionally(error);
            }
        });
        List<String> rows = new ArrayList<>();
        List<MessageExt> found = answer.get(TIMEOUT, TimeUnit.MILLISECONDS).getMsgFoundList();
        if (found != null) for (MessageExt m : found) rows.add("POPPED\t" + m.getTopic() + "\t" + m.getQueueId() + "\t" + m.getQueueOffset()
            + "\t" + m.getReconsumeTimes() + "\t" + m.getKeys() + "\t" + m.getBornTimestamp() + "\t"
            + m.getProperty(MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX) + "\t" + m.getProperty(MessageConst.PROPERTY_POP_CK) + "\t"
            + Base64.getEncoder().encodeToString(m.getBody()));
        return rows;
    }

    private static List<String> ack(String group, String topic, String handle) throws Exception {
        String[] info = ExtraInfoUtil.split(handle);
        AckMessageRequestHeader header = new AckMessageRequestHeader();
        header.setConsumerGroup(group);
        header.setTopic(ExtraInfoUtil.getRealTopic(info, topic, group));
        header.setQueueId(ExtraInfoUtil.getQueueId(info));
        header.setOffset(ExtraInfoUtil.getQueueOffset(info));
        header.setExtraInfo(handle);
        Waiting waiting = new Waiting();
        api.ackMessageAsync(address, TIMEOUT, waiting, header);
        return List.of("ACKED\t" + waiting.result().getStatus());
    }

    private static List<String> hide(String group, String topic, String handle, long invisible) throws Exception {
        String[] info = ExtraInfoUtil.split(handle);
        ChangeInvisibleTimeRequestHeader header = new ChangeInvisibleTimeRequestHeader();
        header.setConsumerGroup(group);
        header.setTopic(ExtraInfoUtil.getRealTopic(info, topic, group));
        header.setQueueId(ExtraInfoUtil.getQueueId(info));
        header.setOffset(ExtraInfoUtil.getQueueOffset(info));
        header.setExtraInfo(handle);
        header.setInvisibleTime(invisible);
        Waiting waiting = new Waiting();
        api.changeInvisibleTimeAsync(broker, address, header, TIMEOUT, waiting);
        AckResult result = waiting.result();
        return List.of("HIDDEN\t" + result.getStatus() + "\t" + result.getExtraInfo());
    }

    private static final class Waiting implements AckCallback {
        private final CompletableFuture<AckResult> answer = new CompletableFuture<>();

        @Override public void onSuccess(AckResult result) {
            answer.complete(result);
        }

        @Override public void onException(Throwable error) {
            answer.completeExceptionally(error);
        }

        AckResult result() throws Exception {
            return answer.get(TIMEOUT, TimeUnit.MILLISECONDS);
        }
    }
}
