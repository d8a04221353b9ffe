"""Runs the steps of one case over a fresh database, relay and replicas, and compares."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.storm import script
from tests.storm.known import KnownFaults
from tests.storm.live import MANY_TRIES, LiveFetcher, Loop, Stalled
from tests.storm.replica import Replica, Row, differences
from tests.storm.script import Step
from tests.storm.site import Session, Site, TableFacts

NAMED_WITHIN_S = 10.0
HEALED_WITHIN_S = 60.0
SESSIONS = 3


@dataclasses.dataclass
class Tally:
    """What was done; the report adds them up."""

    successes: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: Counter[str] = dataclasses.field(default_factory=Counter)
    refusals: Counter[str] = dataclasses.field(default_factory=Counter)
    suspensions: Counter[str] = dataclasses.field(default_factory=Counter)
    comparisons: int = 0
    unequal_but_named: int = 0
    unsent: int = 0
    known: Counter[str] = dataclasses.field(default_factory=Counter)
    healed: int = 0
    slow: list[str] = dataclasses.field(default_factory=list)
    events: int = 0

    def add(self, other: Tally) -> None:
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

    ``kind``: "content", "stalled", "fault" or "unhealed".
    """

    def __init__(self, kind: str, table: str, details: list[str]) -> None:
        super().__init__(f"{kind}: {table}: " + "; ".join(details[:3]))
        self.kind, self.table, self.details = kind, table, details


class TooSlow(Exception):
    """The machine is too slow for the case: nothing is known of the rest."""


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
    ) -> None:
        self.site = site
        self._known = known
        self.tally = Tally()
        self.steps: list[Step] = []
        self._loop, self._folder = loop, folder
        self._named_within_s = named_within_s
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        site.fresh()
        self.sessions: list[Session] = []
        self.fetchers: dict[str, LiveFetcher] = {}
        try:
            self.sessions = [site.session() for _ in range(SESSIONS)]
        except BaseException:
            self.close()
            raise

    def _fetcher(self, name: str) -> LiveFetcher:
        return LiveFetcher(self._loop, self.site.config(name), self._folder / name, self.site.mark)

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        for fetcher in self.fetchers.values():
            self.tally.events += fetcher.replica.event_count if fetcher.has_replica else 0
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
            self.tally.successes[step.production] += 1
            return True
        try:
            self.sessions[step.session].execute(step.sql)
        except Exception as error:
            self.tally.failures[step.production] += 1
            self.tally.refusals[f"{step.production}: {error.args}"[:160]] += 1
            return False
        self.tally.successes[step.production] += 1
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
        else:
            self.site.restart(kill=action == script.KILL_SERVER)

    def _start(self) -> None:
        self.fetchers["stream"] = self._fetcher("stream")

    def _start_late(self) -> None:
        is_open = self.site.is_open() or any(session.in_transaction for session in self.sessions)
        if "dump" in self.fetchers or is_open:
            return  # PostgreSQL makes no slot while a transaction is open.
        try:
            late = self._fetcher("dump")
        except Stalled as error:
            if error.code == "preflight_failed":
                return  # A new relay refuses a table that it cannot capture, and names it.
            raise
        self.fetchers["dump"] = late
        late.dump([name for name in late.fetcher.known_sources() if name != self.site.mark])

    @staticmethod
    def _stalled_is_a_difference(work: Callable[[], object]) -> None:
        try:
            work()
        except Stalled as error:
            if error.is_slow:
                raise TooSlow(str(error)) from error
            raise Difference("stalled", "", [str(error)]) from error

    def check(self) -> None:
        """Every followed table of every replica is what a SELECT gives.

        Raises:
            Difference: one is not.
        """
        number = self.site.put_mark()
        if number is None:
            return
        is_open = any(session.in_transaction for session in self.sessions)
        compared = [
            table
            for table in self.site.tables()
            if table.kind == "table"
            and self.site.is_captured(table.schema)
            # Rows of such a table are visible before they are logged.
            and not (is_open and not table.is_transactional)
        ]
        rows = {table.source: self._rows(table) for table in compared}
        for name, fetcher in self.fetchers.items():
            self._stalled_is_a_difference(partial(fetcher.wait_mark, number))
            if fetcher.is_dumping:
                continue  # Its rows are still to come.
            undumped = fetcher.undumped() if name == "dump" else set()
            for table in compared:
                found = rows[table.source]
                if found is not None and table.source not in undumped:
                    self._compare(name, fetcher, table, found)
            if fetcher.replica.faults and name == "stream":
                raise Difference("fault", name, fetcher.replica.faults)

    def _rows(self, table: TableFacts) -> list[Row] | None:
        """What a SELECT gives; None: a session has locked the table."""
        try:
            return self.site.rows(table)
        except Exception:
            return None

    def _compare(self, name: str, fetcher: LiveFetcher, table: TableFacts, rows: list[Row]) -> None:
        self.tally.comparisons += 1
        columns = [column.name for column in table.columns if column.is_carried]

        def unequal() -> list[str]:
            held = fetcher.replica.tables.get(table.source)
            if held is None:
                return [f"no event of it, {len(rows)} rows at the source"] if rows else []
            key = held.schema.key if held.schema else ()
            if not set(key) <= set(columns):
                key = table.key  # PostgreSQL announces a new key with the next row.
            found, unsent = differences(columns, list(key), rows, held)
            self.tally.unsent += unsent
            return found

        found = unequal()
        if not found:
            return
        deadline_s = time.monotonic() + self._named_within_s
        while found and not self._is_named(fetcher, table):
            if time.monotonic() > deadline_s:
                raise Difference("content", f"{table.source} of {name}", found)
            time.sleep(0.01)
            fetcher.replica.read()
            found = unequal()
        if found:
            self.tally.unequal_but_named += 1

    @staticmethod
    def _is_named(fetcher: LiveFetcher, table: TableFacts) -> bool:
        return fetcher.replica.state(table.source) is not None or table.source in fetcher.named()

    def finish(self) -> None:
        """All sessions rest: compare everything, and let suspended tables come back.

        Raises:
            Difference: something is unequal, or does not come back though nothing hinders it.
        """
        for number, session in enumerate(self.sessions):
            if session.in_transaction:
                self.run(Step(number, "ROLLBACK", "rollback"))
        self.run(script.check())
        for fetcher in self.fetchers.values():
            self._stalled_is_a_difference(fetcher.wait_dumped)
            self._wait_healed(fetcher)
            self.tally.suspensions.update(reasons(fetcher.replica))
        self.check()

    def _wait_healed(self, fetcher: LiveFetcher) -> None:
        """Tables that are suspended are followed again, after a while.

        Raises:
            Difference: one is not, after many attempts.
            TooSlow: the attempts did not come to an end.
        """
        deadline_s = time.monotonic() + HEALED_WITHIN_S
        there = {
            table.source
            for table in self.site.tables()
            if table.kind == "table" and self.site.is_captured(table.schema)
        }
        before = {record.source for record in fetcher.unfollowed()} & there
        while True:
            fetcher.replica.read()
            left, known = [], {}
            for record in fetcher.unfollowed():
                if record.source not in there:
                    continue
                words = f"{record.reason}; {record.error}"
                found = Difference("unhealed", record.source, [words])
                if record.error and (why := self._known.why(self.site.product, found)):
                    known[record.source] = why
                elif record.tries >= MANY_TRIES:
                    raise found
                else:
                    left.append(words)
            if not left:
                self.tally.known.update(known.values())
                self.tally.healed += len(before - known.keys())
                return
            if time.monotonic() > deadline_s:
                raise TooSlow(f"not within {HEALED_WITHIN_S} s: {left}")
            time.sleep(0.01)


def reasons(replica: Replica) -> Counter[str]:
    return Counter(general(state.reason) for state in replica.suspensions)


def general(reason: str) -> str:
    """A reason without the numbers and names of one case."""
    words = [
        "~" if any(letter.isdigit() or letter in "`'\"" for letter in word) else word
        for word in reason.split()
    ]
    return " ".join(words)[:140]
