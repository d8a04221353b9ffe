// Takes changes of one table off a Node client and counts them.
// node drain.mjs '{"client", "modules", "host", "port", "user", "password", "database", "table",
//                  "rows", and "file" or "slot" and "publication"}'; prints one line of JSON.
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';
import fs from 'node:fs';

const given = JSON.parse(process.argv[2]);
const require = createRequire(`${given.modules}/index.js`);
let rows = 0, before = 0, started = 0n, startedCpu = 0;
const cpuSeconds = () => { const used = process.cpuUsage(); return (used.user + used.system) / 1e6; };

function took(count) {
  rows += count;
  if (started === 0n) { started = process.hrtime.bigint(); startedCpu = cpuSeconds(); before = rows; }
  if (rows < given.rows) return;
  const peak = /VmHWM:\s+(\d+)/.exec(fs.readFileSync('/proc/self/status', 'utf8'))[1];
  console.log(JSON.stringify({
    rows: rows - before,
    seconds: Number(process.hrtime.bigint() - started) / 1e9,
    cpu_seconds: cpuSeconds() - startedCpu,
    peak_rss_bytes: Number(peak) * 1024,
  }));
  process.exit(0);
}

function failed(error) { console.error(error); process.exit(1); }

const server = { host: given.host, port: given.port, user: given.user, password: given.password, database: given.database };
if (given.client === 'zongji') {
  const module = await import(pathToFileURL(require.resolve('@vlasky/zongji')));
  const client = new module.default(server);
  client.on('binlog', (event) => { if (event.rows) took(event.rows.length); });
  client.on('error', failed);
  client.start({
    filename: given.file, position: 4, serverId: 900000 + process.pid % 1000,
    includeEvents: ['tablemap', 'writerows', 'rotate'], includeSchema: { [given.database]: [given.table] },
  });
} else {
  const { LogicalReplicationService, PgoutputPlugin } = require('pg-logical-replication');
  const client = new LogicalReplicationService(server, { acknowledge: { auto: false, timeoutSeconds: 10 } });
  client.on('data', (_, message) => { if (message.tag === 'insert') took(1); });
  client.on('error', failed);
  await client.subscribe(new PgoutputPlugin({ protoVersion: 1, publicationNames: [given.publication] }), given.slot);
}
