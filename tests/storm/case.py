"""Runs the steps of one case over a fresh database, relay and replicas, and compares."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from databus.common.errors import SourcePositionLost, SourceUnavailable
from tests.storm import script
from tests.storm.bootstrapped import Bootstrapped
from tests.storm.kinds import kind_of
from tests.storm.known import KnownFaults
from tests.storm.live import MANY_TRIES, Latecomer, LiveFetcher, Loop, Patience, Stalled
from tests.storm.replica import Replica, Row, differences
from tests.storm.script import Step
from tests.storm.site import Session, Site, TableFacts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMED_WITHIN_S = 10.0
SESSIONS = 3
COPY_EVERY = 3
"""At each so manieth comparison, what a bootstrap gives is compared too."""


@dataclasses.dataclass
class StormCounters:
    """What was done; the report adds them up."""

    successes: Counter[str] = dataclasses.field(default_factory=Counter)
    kinds: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: Counter[str] = dataclasses.field(default_factory=Counter)
    refusals: Counter[str] = dataclasses.field(default_factory=Counter)
    suspensions: Counter[str] = dataclasses.field(default_factory=Counter)
    comparisons: Counter[str] = dataclasses.field(default_factory=Counter)
    unequal_but_named: int = 0
    known: Counter[str] = dataclasses.field(default_factory=Counter)
    healed: int = 0
    undumped: int = 0
    merges: int = 0
    slow: list[str] = dataclasses.field(default_factory=list)
    events: int = 0

    def add(self, other: StormCounters) -> None:
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            elif isinstance(mine, list):
                mine.extend(theirs)
            else:
                setattr(self, field.name, mine + theirs)


class Difference(Exception):
    """A table that is followed is not what the source has, or the stream stalls.

    ``kind``: "content", "stalled", "fault", "unhealed" or "unseeded".  ``history``: the last
    frames of the table, as the replica came by them.
    """

    def __init__(
        self, kind: str, table: str, details: list[str], history: Iterable[str] = ()
    ) -> None:
        super().__init__(f"{kind}: {table}: " + "; ".join(details[:3]))
        self.kind, self.table, self.details, self.history = kind, table, details, list(history)


class TooSlow(Exception):
    """The machine is too slow for the case: nothing is known of the rest."""


class ServerLost(Exception):
    """The server does not come up again: nothing is known of the rest."""


class Ended(Exception):
    """The stream has ended by name, as it must: there is nothing more to compare."""


class Compared(Protocol):
    """What is compared with the source."""

    def read(self) -> Replica:
        """What a consumer holds now."""

    def is_named(self, source: str) -> bool:
        """Whether a table is reported as not followed."""


class Case:
    """One fresh world.

    Invariants:
        I1. The same steps send the same statements in the same order over the same sessions.

    Owner: the driver's thread.
    """

    def __init__(
        self,
        site: Site,
        loop: Loop,
        folder: Path,
        known: KnownFaults,
        *,
        named_within_s: float = NAMED_WITHIN_S,
        spark: SparkSession | None = None,
    ) -> None:
        self.site = site
        self._known = known
        self.counters = StormCounters()
        self.steps: list[Step] = []
        self._loop, self._folder = loop, folder
        self._named_within_s = named_within_s
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        site.fresh()
        self.sessions: list[Session] = []
        self.fetchers: dict[str, LiveFetcher | Latecomer] = {}
        self.bootstrapped: Bootstrapped | None = None
        self._spark, self._checks = spark, 0
        try:
            self.sessions = [site.session() for _ in range(SESSIONS)]
        except BaseException:
            self.close()
            raise

    @property
    def stream(self) -> LiveFetcher:
        """The relay that is there from the beginning."""
        found = self.fetchers["stream"]
        assert isinstance(found, LiveFetcher)
        return found

    def _fetcher(self, name: str) -> LiveFetcher:
        return LiveFetcher(self._loop, self.site.config(name), self._folder / name, self.site.mark)

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        if self.bootstrapped is not None:
            self.bootstrapped.stop()
        for fetcher in reversed(self.fetchers.values()):
            self.counters.events += fetcher.replica.event_count if fetcher.has_replica else 0
            fetcher.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, step: Step) -> bool:
        """Send a statement; False if the server refused it.

        Raises:
            Difference: from a comparison.
        """
        self.steps.append(step)
        if step.production != script.SET_UP and not self.fetchers:
            self._stalled_is_a_difference(self._start)
        if step.is_action:
            self._act(step.sql)
            self.counters.successes[step.production] += 1
            return True
        try:
            self.sessions[step.session].execute(step.sql)
        except Exception as error:
            self.counters.failures[step.production] += 1
            self.counters.refusals[f"{step.production}: {error.args}"[:160]] += 1
            return False
        self.counters.successes[step.production] += 1
        self.counters.kinds[kind_of(step.sql)] += 1
        return True

    def _act(self, action: str) -> None:
        if action == script.CHECK:
            self.check()
        elif action == script.RESTART_RELAY:
            if self.site.put_mark() is None:
                return  # It could not start before the session in the way has ended.
            for fetcher in self.fetchers.values():
                self._stalled_is_a_difference(fetcher.restart)
        elif action == script.START_LATE:
            self._stalled_is_a_difference(self._start_late)
        elif action == script.START_BOOTSTRAP:
            self._start_bootstrap()
        elif action == script.RESTART_BOOTSTRAP:
            if self.bootstrapped is not None:
                self.bootstrapped.restart()
        elif action == script.MERGE:
            self._merge()
        elif action == script.RESET_LOGS:
            self._reset_logs()
        else:
            try:
                self.site.restart(kill=action == script.KILL_SERVER)
            except SourceUnavailable as error:
                raise ServerLost(error.message) from error

    def _start(self) -> None:
        self.fetchers["stream"] = self._fetcher("stream")

    def _start_late(self) -> None:
        is_open = self.site.is_open() or any(session.in_transaction for session in self.sessions)
        if "dump" in self.fetchers or is_open:
            return  # PostgreSQL makes no slot while a transaction is open.
        if self.site.has_one_relay:
            self._dump_late(Latecomer(self.stream))
            return
        try:
            late = self._fetcher("dump")
        except Stalled as error:
            if error.code == "preflight_failed":
                return  # A new relay refuses a table that it cannot capture, and names it.
            raise
        self._dump_late(late)

    def _dump_late(self, late: LiveFetcher | Latecomer) -> None:
        self.fetchers["dump"] = late
        late.dump([name for name in late.fetcher.known_sources() if name != self.site.mark])

    def _reset_logs(self) -> None:
        """The relay reports that its position is lost, whatever is written afterwards.

        Raises:
            Ended: it does.
            Difference: it does not.
        """
        is_open = any(session.in_transaction for session in self.sessions)
        if is_open or not self.site.reset_logs():
            return
        self.counters.successes[script.RESET_LOGS] += 1
        patience = Patience(self._loop)
        while not patience.is_over:
            self.site.put_mark()
            error = self.stream.fetcher.status.error
            if error is not None and error.code == SourcePositionLost.code:
                raise Ended
            time.sleep(0.05)
        raise Difference("stalled", "", ["the binlog was reset, and the relay does not report it"])

    def _start_bootstrap(self) -> None:
        if self.bootstrapped is None:
            self.bootstrapped = Bootstrapped(self._loop, self.stream, self._folder / "bootstrap")

    def _merge(self, *, full: bool = False) -> None:
        if self.bootstrapped is not None and self._spark is not None:
            self.counters.merges += self.bootstrapped.merge(self._spark, full=full)

    def _stalled_is_a_difference(self, work: Callable[[], object]) -> bool:
        """Whether it was done; a relay that the case hinders by name is waited for later."""
        try:
            work()
        except Stalled as error:
            if self.site.is_lost(error.code):
                raise Ended from error
            if self.site.is_refused(str(error)):
                return False
            if error.is_slow:
                raise TooSlow(str(error)) from error
            raise Difference("stalled", "", [str(error)]) from error
        return True

    def check(self, *, last: bool = False) -> None:
        """Every followed table of every replica is what a SELECT gives.

        ``last``: whatever it costs.

        Raises:
            Difference: one is not.
        """
        number = self.site.put_mark()
        if number is None:
            return
        is_open = any(session.in_transaction for session in self.sessions)
        compared = [
            table
            for table in self._captured()
            # Rows of a table without transactions are visible before they are logged.
            if not (is_open and not table.is_transactional)
        ]
        rows = {table.source: self._rows(table) for table in compared}
        arrived = set[str]()
        for name, fetcher in self.fetchers.items():
            is_here = self._stalled_is_a_difference(partial(fetcher.wait_mark, number))
            if is_here:
                arrived.add(name)
            if not is_here or fetcher.is_dumping:
                continue  # Its rows are still to come.
            undumped = fetcher.undumped() if name == "dump" else set()
            left = [table for table in compared if table.source not in undumped]
            self._compare_all(name, fetcher, left, rows)
            if name == "stream":
                self._check_faults(fetcher, {table.source for table in compared})
        self._checks += 1
        copy = self.bootstrapped
        is_due = last or self._checks % COPY_EVERY == 0
        if copy is not None and is_due and "stream" in arrived:
            at = self.stream.replica.position
            self._stalled_is_a_difference(partial(copy.wait, at))
            self._compare_all("bootstrap", copy, compared, rows)

    def _check_faults(self, fetcher: LiveFetcher | Latecomer, there: set[str]) -> None:
        """Events that fit no row are of tables that are reported by then, or there no more."""
        patience = Patience(self._loop, self._named_within_s)
        while faults := {
            source: found
            for source, found in fetcher.read().faults.items()
            if source in there and not fetcher.is_named(source)
        }:
            if patience.is_over:
                source, found = next(iter(faults.items()))
                if patience.is_slow:
                    raise TooSlow(f"{source} is not named after {patience.waited_s:.0f} s")
                history = fetcher.replica.history.get(source, ())
                raise Difference("fault", source, found, history)
            time.sleep(0.01)

    def _captured(self) -> list[TableFacts]:
        return [
            table
            for table in self.site.tables()
            if table.kind == "table" and self.site.is_captured(table.schema)
        ]

    def _compare_all(
        self,
        name: str,
        view: Compared,
        tables: list[TableFacts],
        rows: dict[str, list[Row] | None],
    ) -> None:
        replica = view.read()
        for table in tables:
            found = rows[table.source]
            if found is not None:
                self._compare(name, view, replica, table, found)

    def _rows(self, table: TableFacts) -> list[Row] | None:
        """What a SELECT gives; None: a session has locked the table."""
        try:
            return self.site.rows(table)
        except Exception:
            return None

    def _compare(
        self, name: str, view: Compared, replica: Replica, table: TableFacts, rows: list[Row]
    ) -> None:
        self.counters.comparisons[name] += 1
        columns = [column.name for column in table.columns if column.is_logged]

        def unequal() -> list[str]:
            held = replica.tables.get(table.source)
            if held is None:
                return [f"no event of it, {len(rows)} rows at the source"] if rows else []
            key = held.schema.key if held.schema else ()
            if not set(key) <= set(columns):
                key = table.key  # PostgreSQL announces a new key with the next row.
            return differences(columns, list(key), rows, held)

        found = unequal()
        if not found:
            return
        patience = Patience(self._loop, self._named_within_s)
        while found and not view.is_named(table.source):
            if patience.is_over and patience.is_slow:
                raise TooSlow(f"{table.source} is not named after {patience.waited_s:.0f} s")
            if patience.is_over:
                history = replica.history.get(table.source, ())
                raise Difference("content", f"{table.source} of {name}", found, history)
            time.sleep(0.01)
            replica = view.read()
            found = unequal()
        if found:
            self.counters.unequal_but_named += 1

    def finish(self) -> None:
        """All sessions rest: compare everything, and let suspended tables come back.

        Raises:
            Difference: something is unequal, or does not come back though nothing hinders it.
        """
        for number, session in enumerate(self.sessions):
            if session.in_transaction:
                self.run(Step(number, "ROLLBACK", "rollback"))
            session.unlock()
        self.site.settle()
        self.run(script.check())
        for fetcher in self.fetchers.values():
            self._stalled_is_a_difference(fetcher.wait_dumped)
            self._wait_healed(fetcher)
            self.counters.suspensions.update(reasons(fetcher.replica))
        if self.bootstrapped is not None:
            self._wait_seeded(self.bootstrapped)
            self._merge(full=self._checks % 2 == 0)
        self.check(last=True)

    def _wait_healed(self, fetcher: LiveFetcher | Latecomer) -> None:
        """Tables that are suspended are followed again, after a while.

        Raises:
            Difference: one is not, after many attempts, or though the machine had time for it.
            TooSlow: it had not.
        """
        patience = Patience(self._loop)
        # A table without a key is reported as long as it has none.
        there = {table.source: table for table in self._captured() if table.key}
        before = {record.source for record in fetcher.unfollowed()} & there.keys()
        # What was tried before its cure counts for nothing.
        tried = {record.source: record.tries for record in fetcher.unfollowed()}
        while True:
            fetcher.replica.read()
            left, known, undumped = [], {}, set()
            for record in fetcher.unfollowed():
                if record.source not in there:
                    continue
                words = f"{record.reason}; {record.error}"
                found = Difference("unhealed", record.source, [words])
                if self.site.is_undumped(there[record.source], words):
                    undumped.add(record.source)
                elif record.error and (why := self._known.why(self.site.product, found)):
                    known[record.source] = why
                elif record.tries >= MANY_TRIES + tried.get(record.source, 0):
                    raise found
                else:
                    left.append(f"{record.source} ({record.state}, {record.tries}): {words}")
            if not left:
                self.counters.known.update(known.values())
                self.counters.undumped += len(undumped)
                self.counters.healed += len(before - known.keys() - undumped)
                return
            if patience.is_over:
                if patience.is_slow:
                    raise TooSlow(f"not within {patience.waited_s:.0f} s: {left}")
                raise Difference(
                    "unhealed", left[0].partition(" (")[0], [*left, *self._loop.waits()]
                )
            time.sleep(0.01)

    def _wait_seeded(self, copy: Bootstrapped) -> None:
        """The bootstrap server serves every table that its relay follows.

        Raises:
            Difference: it reports that it cannot, or the machine had time for it.
            TooSlow: it had not.
        """
        patience = Patience(self._loop)
        followed = copy.relay.fetcher.known_sources()
        # A table that lost its key is gone for the bootstrap server, and reported by the relay.
        there = [table for table in self._captured() if table.source in followed and table.key]
        while left := [
            (table.source, why)
            for table in there
            if (why := copy.unseeded(table.source)) and not self.site.is_undumped(table, why)
        ]:
            if patience.is_over:
                if patience.is_slow:
                    raise TooSlow(f"not seeded within {patience.waited_s:.0f} s: {left}")
                words = [f"{name}: {why}" for name, why in left]
                raise Difference("unseeded", left[0][0], [*words, *self._loop.waits()])
            time.sleep(0.02)


def reasons(replica: Replica) -> Counter[str]:
    return Counter(general(state.reason) for state in replica.suspensions)


def general(reason: str) -> str:
    """A reason without the numbers and names of one case."""
    words = [
        "~" if any(letter.isdigit() or letter in "`'\"" for letter in word) else word
        for word in reason.split()
    ]
    return " ".join(words)[:140]
