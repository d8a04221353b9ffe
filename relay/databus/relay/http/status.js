const NOTHING = "No database is configured.";

function about(status) {
  return status.workers + (status.workers === 1 ? " worker" : " workers");
}
function ring(database) {
  const used = database.ring.used_bytes / database.ring.capacity_bytes;
  return element("div", { class: "range" },
    bar(used, Math.round(used * 100) + " percent of the ring is used"),
    element("div", { class: "ends" },
      element("span", {}, "oldest " + positionText(database.min) + " (serves after "
                          + positionText(database.prev) + ")"),
      element("span", {}, "newest " + positionText(database.max))));
}
function dumps(list) {
  return table(["dump", "state", "sources", "rows", "chunks"], list.map((dump) => [dump.id,
    element("span", { class: tone(dump.state) },
      dump.state + (dump.error ? ": " + dump.error.detail : "")),
    (dump.sources || []).join(", "), count(dump.rows || 0), count(dump.chunks || 0)]));
}
function clients(list) {
  return table(["client", "readers", "at", "behind the ring", "events", "bytes",
                "too old / overtaken"],
    list.filter((client) => client.requests || client.readers).map((client) => [client.name,
      count(client.readers), client.scn === null ? "–" : client.scn,
      client.lag_us === null ? "–" : duration(client.lag_us / 1e6), count(client.events),
      size(client.bytes),
      element("span", { class: client.too_old + client.overtaken ? "warn" : "" },
        count(client.too_old) + " / " + count(client.overtaken))]));
}
function shownDatabase(database, now_us) {
  const served = database.served, tables = database.tables || [];
  const rate = rates(database, now_us, { events: served.events, bytes: served.bytes,
    frames: database.ring ? database.ring.frames_ever : 0 });
  const facts = element("dl", {});
  if (database.lag_us !== null && database.lag_us !== undefined)
    facts.append(fact("behind the source", duration(database.lag_us / 1e6)));
  if (database.max_commit_us) facts.append(fact("last commit", ago(now_us, database.max_commit_us)));
  if (database.ring)
    facts.append(
      fact("ring", size(database.ring.used_bytes) + " of " + size(database.ring.capacity_bytes)),
      fact("windows in the ring", count(database.ring.windows)),
      fact("written", rate ? count(Math.round(rate.frames)) + " frames/s" : "–"));
  facts.append(
    fact("readers", count(served.readers)),
    fact("served", rate ? count(Math.round(rate.events)) + " events/s, "
                          + size(rate.bytes) + "/s" : "–"),
    fact("events served", count(served.events)),
    fact("requests", count(served.requests) + " (" + count(served.errors) + " refused)"),
    fact("too old / overtaken", count(served.too_old) + " / " + count(served.overtaken)),
    fact("clock", database.clock || "–"));
  return card(database, database.url, database.ring ? ring(database) : null, facts,
    suspended(tables.map((one) => one.source), tables), clients(database.clients || []),
    dumps(database.dumps || []), failure(database.fetcher && database.fetcher.error));
}
