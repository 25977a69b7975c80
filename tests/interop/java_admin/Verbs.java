import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/** Verbs: the lines of stdin as calls of mqadmin, one after the other, in one JVM. A line VERB before what each prints. */
public class Verbs {
    public static void main(String[] args) throws Exception {
        System.setErr(System.out);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            System.out.printf("%nVERB %s%n", line);
            MQAdminStartup.main0(line.split(" "), null);
        }
        System.exit(0);
    }
}
