import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.util.Locale;
import java.util.Set;
import java.util.TreeSet;

/** Prints each key of configuration classes: class, key, whether a file's line sets it, its default. */
public class Keys {
    public static void main(String[] names) throws Exception {
        for (String name : names) {
            Class<?> type = Class.forName(name);
            Object made = type.getConstructor().newInstance();
            Set<String> keys = new TreeSet<>();
            for (Class<?> of = type; of != Object.class; of = of.getSuperclass()) {
                for (Field field : of.getDeclaredFields()) {
                    if (!Modifier.isStatic(field.getModifiers()) && !Modifier.isFinal(field.getModifiers())) {
                        keys.add(field.getName());
                    }
                }
            }
            Set<String> settable = new TreeSet<>();
            for (Method method : type.getMethods()) {
                if (method.getName().startsWith("set") && method.getParameterCount() == 1) {
                    settable.add(method.getName().substring(3, 4).toLowerCase(Locale.ROOT) + method.getName().substring(4));
                }
            }
            keys.addAll(settable);
            keys.removeIf(key -> key.startsWith("is") && settable.contains(property(key))); // isX, set by setX
            for (String key : keys) {
                System.out.println(type.getName() + "\t" + key + "\t" + settable.contains(key) + "\t" + value(type, made, key));
            }
        }
    }

    private static String property(String field) {
        return field.length() < 3 ? field : field.substring(2, 3).toLowerCase(Locale.ROOT) + field.substring(3);
    }

    private static Object value(Class<?> type, Object made, String key) throws Exception {
        for (Class<?> of = type; of != Object.class; of = of.getSuperclass()) {
            try {
                return read(of.getDeclaredField(key), made);
            } catch (NoSuchFieldException elsewhere) {
                try {
                    return read(of.getDeclaredField("is" + key.substring(0, 1).toUpperCase(Locale.ROOT) + key.substring(1)), made);
                } catch (NoSuchFieldException stillElsewhere) {
                    continue;
                }
            }
        }
        throw new NoSuchFieldException(type + " has no field of its key " + key);
    }

    private static Object read(Field field, Object made) throws Exception {
        field.setAccessible(true);
        return field.get(made);
    }
}
