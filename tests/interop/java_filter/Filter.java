import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.filter.FilterFactory;
import org.apache.rocketmq.filter.expression.EvaluationContext;
import org.apache.rocketmq.filter.expression.Expression;
import org.apache.rocketmq.filter.expression.MQFilterException;

/**
 * Compiles and evaluates SQL92 expressions with RocketMQ's own classes.
 *
 * Lines of standard input, with texts in hexadecimal UTF-8: "P name value name value ..." adds a set of properties;
 * "E expression" prints "refused", or a letter for each set: T, F, N for null, X for an exception.
 */
public class Filter {
    private static final class Properties implements EvaluationContext {
        private final Map<String, Object> values = new HashMap<>();

        @Override
        public Object get(String name) {
            return values.get(name);
        }

        @Override
        public Map<String, Object> keyValues() {
            return values;
        }
    }

    public static void main(String[] none) throws Exception {
        List<Properties> sets = new ArrayList<>();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        StringBuilder answer = new StringBuilder();
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] parts = line.split(" ", -1);
            if (parts[0].equals("P")) {
                Properties one = new Properties();
                for (int at = 1; at < parts.length; at += 2) {
                    one.values.put(text(parts[at]), text(parts[at + 1]));
                }
                sets.add(one);
            } else {
                answer.append(answer(text(parts[1]), sets)).append('\n');
            }
        }
        System.out.print(answer);
    }

    private static String answer(String text, List<Properties> sets) {
        Expression compiled;
        try {
            compiled = FilterFactory.INSTANCE.get("SQL92").compile(text);
        } catch (MQFilterException refused) {
            return "refused";
        }
        StringBuilder letters = new StringBuilder();
        for (Properties one : sets) {
            letters.append(letter(compiled, one));
        }
        return letters.toString();
    }

    private static char letter(Expression compiled, Properties properties) {
        try {
            Object value = compiled.evaluate(properties);
            return value == null ? 'N' : (Boolean) value ? 'T' : 'F';
        } catch (Exception failed) {
            return 'X';
        }
    }

    private static String text(String hexadecimal) {
        byte[] bytes = new byte[hexadecimal.length() / 2];
        for (int at = 0; at < bytes.length; at++) {
            bytes[at] = (byte) Integer.parseInt(hexadecimal.substring(2 * at, 2 * at + 2), 16);
        }
        return new String(bytes, StandardCharsets.UTF_8);
    }
}
