import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.format.Json;
import java.io.BufferedWriter;
import java.io.FileReader;
import java.io.Reader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Properties;

/**
 * Runs Debezium's engine and writes each of its records as a line of JSON.
 *
 * <p>Arguments: a file of the engine's properties, and the file to append to. It runs until its
 * standard input is closed.
 */
public final class DebeziumRecords {
  public static void main(String[] arguments) throws Exception {
    Properties properties = new Properties();
    try (Reader reader = new FileReader(arguments[0])) {
      properties.load(reader);
    }
    ObjectMapper mapper = new ObjectMapper();
    BufferedWriter output = Files.newBufferedWriter(Path.of(arguments[1]));
    DebeziumEngine<ChangeEvent<String, String>> engine =
        DebeziumEngine.create(Json.class, Json.class, Json.class)
            .using(properties)
            .using((success, message, error) -> {
              System.err.println("the engine has ended: " + message);
              if (error != null) {
                error.printStackTrace();
              }
              Runtime.getRuntime().halt(1);
            })
            .notifying((List<ChangeEvent<String, String>> records,
                DebeziumEngine.RecordCommitter<ChangeEvent<String, String>> committer) -> {
              try {
                for (ChangeEvent<String, String> record : records) {
                  ObjectNode line = mapper.createObjectNode();
                  line.put("topic", record.destination());
                  line.put("key", record.key());
                  line.put("value", record.value());
                  ObjectNode headers = line.putObject("headers");
                  for (var header : record.headers()) {
                    headers.put(header.getKey(), String.valueOf(header.getValue()));
                  }
                  output.write(mapper.writeValueAsString(line));
                  output.newLine();
                  committer.markProcessed(record);
                }
                output.flush();
              } catch (java.io.IOException error) {
                throw new java.io.UncheckedIOException(error);
              }
              committer.markBatchFinished();
            })
            .build();
    Thread thread = new Thread(engine);
    thread.setDaemon(true);
    thread.start();
    while (System.in.read() >= 0) {
      // Only its end counts.
    }
    engine.close();
    Runtime.getRuntime().halt(0);
  }
}
