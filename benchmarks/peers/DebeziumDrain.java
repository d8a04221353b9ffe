import io.debezium.embedded.Connect;
import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.DebeziumEngine.ChangeConsumer;
import io.debezium.engine.DebeziumEngine.RecordCommitter;
import io.debezium.engine.RecordChangeEvent;
import io.debezium.engine.format.ChangeEventFormat;
import io.debezium.engine.format.Json;
import java.io.FileReader;
import java.io.IOException;
import java.io.Reader;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Instant;
import java.util.List;
import java.util.Locale;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import org.apache.kafka.connect.source.SourceRecord;

/**
 * Takes changes off a Debezium embedded engine and looks at nothing but their topic.
 *
 * <p>Usage: DebeziumDrain FILE.properties. Keys under "drain." are ours: topic (the end of its name),
 * rows (how many, and then end), format (json or connect). The clock starts with the first batch, so
 * the start of the virtual machine and of the connector are not counted. Prints one line of JSON.
 * With "drain.arrivals", a file, it prints "streaming" at the first record of any topic, and at the end
 * writes when each row came there: 64-bit microseconds, by the id that is the row's key (JSON only).
 */
public final class DebeziumDrain {
    private static final CountDownLatch DONE = new CountDownLatch(1);
    private static String topic;
    private static long wanted;
    private static long rows;
    private static long before;
    private static long startedNs;
    private static long startedCpuNs;
    private static String arrivals;
    private static long[] arrivedUs;
    private static boolean isStreaming;

    private static long cpuNs() {
        var system = (com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        return system.getProcessCpuTime();
    }

    private static void count(String destination, boolean hasValue) {
        if (hasValue && destination != null && destination.endsWith(topic)) {
            rows++;
        }
    }

    private static void arrived(String destination, String key) {
        if (!isStreaming) {
            isStreaming = true;
            System.out.println("streaming");
        }
        if (destination != null && destination.endsWith(topic)) {
            int id = Integer.parseInt(key.replaceAll("[^0-9]", ""));
            Instant now = Instant.now();
            arrivedUs[id] = now.getEpochSecond() * 1_000_000 + now.getNano() / 1000;
        }
    }

    private static void writeArrivals() throws IOException {
        ByteBuffer content = ByteBuffer.allocate(8 * arrivedUs.length).order(ByteOrder.LITTLE_ENDIAN);
        content.asLongBuffer().put(arrivedUs);
        Files.write(Path.of(arrivals), content.array());
    }

    private static void endOfBatch() throws Exception {
        if (startedNs == 0 && rows > 0) {
            startedNs = System.nanoTime();
            startedCpuNs = cpuNs();
            before = rows;
        }
        if (rows >= wanted && DONE.getCount() > 0) {
            long counted = rows > before ? rows - before : rows;
            double seconds = (System.nanoTime() - startedNs) / 1e9;
            double cpu = (cpuNs() - startedCpuNs) / 1e9;
            long peakKib = 0;
            for (String line : Files.readAllLines(Path.of("/proc/self/status"))) {
                if (line.startsWith("VmHWM")) {
                    peakKib = Long.parseLong(line.replaceAll("[^0-9]", ""));
                }
            }
            if (arrivals != null) {
                writeArrivals();
            }
            System.out.printf(Locale.ROOT, "{\"rows\": %d, \"seconds\": %.6f, \"cpu_seconds\": %.6f, \"peak_rss_bytes\": %d}%n",
                counted, seconds, cpu, peakKib * 1024);
            System.out.flush();
            DONE.countDown();
        }
    }

    private static final class AsJson implements ChangeConsumer<ChangeEvent<String, String>> {
        @Override
        public void handleBatch(List<ChangeEvent<String, String>> records,
                RecordCommitter<ChangeEvent<String, String>> committer) throws InterruptedException {
            for (ChangeEvent<String, String> one : records) {
                if (arrivals != null) {
                    arrived(one.destination(), one.key());
                }
                count(one.destination(), one.value() != null);
                committer.markProcessed(one);
            }
            committer.markBatchFinished();
            atEnd();
        }
    }

    private static final class AsRecords implements ChangeConsumer<RecordChangeEvent<SourceRecord>> {
        @Override
        public void handleBatch(List<RecordChangeEvent<SourceRecord>> records,
                RecordCommitter<RecordChangeEvent<SourceRecord>> committer) throws InterruptedException {
            for (RecordChangeEvent<SourceRecord> one : records) {
                count(one.record().topic(), one.record().value() != null);
                committer.markProcessed(one);
            }
            committer.markBatchFinished();
            atEnd();
        }
    }

    private static void atEnd() {
        try {
            endOfBatch();
        } catch (Exception error) {
            throw new IllegalStateException(error);
        }
    }

    public static void main(String[] arguments) throws Exception {
        Properties given = new Properties();
        try (Reader reader = new FileReader(arguments[0])) {
            given.load(reader);
        }
        topic = "." + given.remove("drain.topic");
        wanted = Long.parseLong((String) given.remove("drain.rows"));
        arrivals = (String) given.remove("drain.arrivals");
        arrivedUs = new long[arrivals == null ? 0 : (int) wanted];
        boolean json = given.remove("drain.format").equals("json");
        DebeziumEngine.CompletionCallback ended = (success, message, error) -> {
            if (!success) {
                System.err.println(message);
                if (error != null) {
                    error.printStackTrace();
                }
                Runtime.getRuntime().halt(1);
            }
        };
        DebeziumEngine<?> engine = json
            ? DebeziumEngine.create(Json.class).using(given).notifying(new AsJson()).using(ended).build()
            : DebeziumEngine.create(ChangeEventFormat.of(Connect.class)).using(given).notifying(new AsRecords()).using(ended).build();
        Thread thread = new Thread(engine, "engine");
        thread.setDaemon(true);
        thread.start();
        DONE.await();
        if (wanted == 1) {
            engine.close();
        }
        Runtime.getRuntime().halt(0);
    }
}
