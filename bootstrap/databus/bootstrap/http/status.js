const RUNS_SHOWN = 20;
const SOURCES_SHOWN = 50;
const NOTHING = "No database has a log yet.";

function about(status) {
  return "relays " + status.relays.join(", ");
}
function log(database) {
  return element("div", { class: "range" },
    element("div", { class: "ends" },
      element("span", {}, "oldest " + positionText(database.prev)),
      element("span", {}, "snapshot " + positionText(database.snapshot)),
      element("span", {}, "newest " + positionText(database.max))));
}
function applier(one) {
  if (one.state !== "merging" && one.state !== "down") return null;
  const share = one.tasks ? one.tasks_done / one.tasks : 0;
  const words = "merging " + count(one.runs) + " runs of " + count(one.rows_in) + " rows into a "
    + one.kind + ": " + count(one.tasks_done || 0) + " of " + count(one.tasks || 0) + " tasks";
  return element("div", { class: "range" }, bar(share, words),
    element("div", { class: "ends" }, element("span", {}, words),
      element("span", {}, one.state === "down" ? "silent since, perhaps dead" : "")));
}
function seeding(sources, now_us) {
  const rows = Object.entries(sources).filter(([, one]) => one.state !== "seeded");
  const cells = ([name, one]) => [name, state(one.state),
    one.rows === undefined ? "–" : count(one.rows),
    one.tries ? count(one.tries) + (one.again_us > now_us
      ? ", again in " + duration((one.again_us - now_us) / 1e6) : "") : "–",
    one.error || "–"];
  return [table(["not whole yet", "state", "rows", "failed", "because"],
    rows.slice(0, SOURCES_SHOWN).map(cells)), shown(rows, SOURCES_SHOWN, "sources")];
}
function gaps(list, now_us) {
  return table(["lost after", "up to", "seen", "repaired"], list.map((gap) => [
    positionText(gap.from), positionText(gap.to), ago(now_us, gap.at_us),
    gap.repaired_us ? ago(now_us, gap.repaired_us)
      : gap.bridged ? element("span", { class: "warn" }, "being compared with the database")
        : "dumped again"]));
}
function runs(list, now_us) {
  const newest = list.slice().reverse();
  return [table(["run", "from", "to", "rows", "files", "size", "made"],
    newest.slice(0, RUNS_SHOWN).map((run) => [run.kind, positionText(run.start), positionText(run.stop),
      count(run.rows), count(run.files), size(run.file_bytes), ago(now_us, run.created_us)])),
    shown(newest, RUNS_SHOWN, "runs")];
}
function applies(list, now_us) {
  return table(["merged", "into a", "up to", "runs", "rows", "size", "in"],
    list.slice().reverse().map((one) => [ago(now_us, one.finished_us), one.kind, positionText(one.stop),
      count(one.tier), count(one.rows_in) + " → " + count(one.rows_out),
      size(one.bytes_in) + " → " + size(one.bytes_out), duration(one.seconds)]));
}
function servedNow(database, now_us) {
  const { rows, bytes } = database.served, rate = rates(database, now_us, { rows, bytes });
  return rate ? count(Math.round(rate.rows)) + " rows/s, " + size(rate.bytes) + "/s" : "–";
}
function shownDatabase(database, now_us) {
  const writer = database.writer || {}, stopped = database.suspended || {};
  const facts = element("dl", {}, fact("log writer", state(writer.state || "unknown")));
  const parts = [facts];
  if (database.log) {
    const sources = Object.values(database.seeding), served = database.served;
    const whole = sources.filter((one) => one.state === "seeded").length;
    const bytes = database.runs.reduce((sum, run) => sum + run.file_bytes, 0);
    facts.append(
      fact("applier", state(database.applier.state)),
      fact("sources whole", count(whole) + " of " + count(sources.length)),
      fact("hot log", size(database.log.frame_bytes)),
      fact("runs", count(database.runs.length) + ", " + size(bytes)),
      fact("retained for readers", count(database.retired_runs) + " replaced runs"),
      fact("readers", count(served.readers)),
      fact("served", servedNow(database, now_us)),
      fact("rows served", count(served.rows)),
      fact("row groups", count(served.row_groups_read) + " read, "
                         + count(served.row_groups_skipped) + " skipped"),
      fact("clock", database.clock));
    parts.unshift(log(database));
    parts.push(applier(database.applier), ...seeding(database.seeding, now_us),
      suspended(Object.keys(stopped), Object.values(stopped)), gaps(database.gaps, now_us),
      ...runs(database.runs, now_us), applies(database.applies, now_us));
  }
  return card(database, database.store, ...parts,
    ...[database.error, writer.error, database.applier && database.applier.error].map(failure));
}
