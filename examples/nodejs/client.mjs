// Keeps a copy of a database's tables in a file, always at the end of a transaction. Node.js 18.
//   node client.mjs RELAY_URL BOOTSTRAP_URL DATABASE FILE
import { existsSync, readFileSync, renameSync, writeFileSync } from "node:fs";

const [relay, bootstrap, database, file] = process.argv.slice(2);
const copy = existsSync(file) ? JSON.parse(readFileSync(file)) : { checkpoint: null, tables: {} };
let server = copy.checkpoint?.mode === "online" ? "relay" : "bootstrap"; // new: the whole tables
let changes = []; // of the transaction that is being received

function apply({ source, op, key, after }) {
  const table = (copy.tables[source] ??= {});
  const id = JSON.stringify(key);
  if (op === "t") copy.tables[source] = {};
  else if (op === "d") delete table[id];
  else table[id] = { ...table[id], ...after }; // an unchanged large value may be absent
}

function store(checkpoint) {
  changes.forEach(apply);
  changes = [];
  copy.checkpoint = checkpoint; // becomes durable together with the changes before it
  writeFileSync(`${file}.new`, JSON.stringify(copy));
  renameSync(`${file}.new`, file);
}

function receive(message, clock) {
  const { control, scn, seq } = message;
  if (!control) changes.push(message);
  else if (control === "error") throw message;
  else if (control === "checkpoint") {
    if (message.checkpoint.mode === "online") server = "relay"; // the bootstrap is complete
    store(message.checkpoint);
  } else if (server === "relay" && (control === "end_of_window" || (control === "heartbeat" && !changes.length)))
    store({ v: 1, db: database, clock, mode: "online", scn, seq });
}

async function read() {
  const query = new URLSearchParams({ format: "ndjson" });
  if (copy.checkpoint) query.set("checkpoint", JSON.stringify(copy.checkpoint));
  if (server === "relay") query.set("follow", "true");
  const url = server === "relay" ? `${relay}/v1/${database}/stream` : `${bootstrap}/v1/${database}/bootstrap`;
  const answer = await fetch(`${url}?${query}`);
  if (!answer.ok) throw await answer.json(); // a problem document with a stable code
  let rest = "";
  for await (const text of answer.body.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + text).split("\n");
    rest = lines.pop(); // not whole yet
    for (const line of lines) receive(JSON.parse(line), answer.headers.get("databus-clock"));
  }
}

for (;;) {
  changes = []; // the server sends everything behind the stored checkpoint again
  try {
    await read();
  } catch (problem) {
    console.error(problem.code ?? problem.message, problem.detail ?? "");
    if (problem.code === "scn_too_old") server = "bootstrap"; // the ring has moved on
    else await new Promise((resolve) => setTimeout(resolve, 500));
  }
}
