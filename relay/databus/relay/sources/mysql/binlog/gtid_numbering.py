"""What tells MariaDB's GTIDs from MySQL's: the clock, the positions, the dump, the snapshots."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from databus.common.errors import SourcePositionLost
from databus.relay.sources.contract import Snapshot
from databus.relay.sources.mysql.binlog.binlog_decoder import BinlogDecoder
from databus.relay.sources.mysql.binlog.groups_without_scn import SuspendingGroup
from databus.relay.sources.mysql.binlog.mysql_decoder import MySqlDecoder
from databus.relay.sources.mysql.gtid import binlog_positions, gtid_sets
from databus.relay.sources.mysql.gtid.binlog_locations import BinlogLocation, LocatedSnapshot
from databus.relay.sources.mysql.gtid.foreign_gtids import ForeignGtids
from databus.relay.sources.mysql.gtid.gtid_sets import GtidSet, Intervals
from databus.relay.sources.mysql.gtid.mysql_lineage import LineageMark, MySqlResumeState
from databus.relay.sources.mysql.gtid.promotion import Promotion, is_replicating
from databus.relay.sources.mysql.protocol.mysql_connection import (
    BinlogRequest,
    MySqlConnection,
    ServerError,
)
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings
from databus.relay.sources.mysql.rows.charsets import Charsets
from databus.relay.sources.mysql.tables.mysql_tables import Catalogue

# A commit takes milliseconds; a number that is owned for longer a session has taken for later.
_COMMITTED_WITHIN_S = 5.0
_ASKED_EVERY_S = 0.01


@dataclass(frozen=True, slots=True)
class DumpStart:
    """What to ask the server for, and the transaction to recognise in what comes.

    ``expected`` is None where that one was purged: then nothing tells histories apart.
    ``after_scn``: no transaction up to there may come; 0 where files are read from their
    beginning.  ``begins_after``: what comes first follows on a transaction at or before it.
    ``ends``: see ``MySqlResumeState``.  ``unread``: GTIDs of servers that are not followed, which
    were purged before they were read.
    """

    request: BinlogRequest
    expected: LineageMark | None
    after_scn: int = 0
    ends: tuple[int, ...] = ()
    begins_after: int = 0
    unread: str = ""


class Numbering(Protocol):
    """How a server numbers its transactions."""

    def clock(self, name: str) -> str:
        """The clock's identity."""

    def head(self, connection: MySqlConnection) -> int:
        """The scn of the last transaction."""

    def beginning(self, connection: MySqlConnection) -> MySqlResumeState:
        """What a stream needs that begins now, at the first start: after ``head``."""

    def foreign(self, connection: MySqlConnection) -> str:
        """The GTIDs of other domains or servers until now, in the server's form."""

    def shows(self, connection: MySqlConnection, group: SuspendingGroup) -> bool:
        """Whether a snapshot that is taken now shows a group of the binlog that has no scn."""

    def dump_after(
        self, connection: MySqlConnection, settings: MySqlSettings, resume_state: MySqlResumeState
    ) -> DumpStart:
        """The request for everything after a memo's scn, and what it needs before that.

        Raises:
            SourcePositionLost: the server no longer has it, or does not have it yet.
        """

    def decoder(
        self,
        settings: MySqlSettings,
        charsets: Charsets,
        catalogue: Catalogue,
        resume_state: MySqlResumeState,
    ) -> BinlogDecoder:
        """The reader of what that request brings."""

    def snapshot(self, connection: MySqlConnection) -> AbstractContextManager[Snapshot]:
        """A transaction that reads at one point, for as long as the context is open."""

    def facts(self, connection: MySqlConnection) -> dict[str, Any]:
        """For the status: what the server says of its positions."""


@contextmanager
def transaction(connection: MySqlConnection, begin: str) -> Iterator[None]:
    """A read transaction that ``begin`` opens; it is rolled back at the end, unless the
    connection was closed, which does the same."""
    connection.query(begin)
    try:
        yield
    finally:
        if connection.is_open:
            connection.query("ROLLBACK")


_REPEATABLE = "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ"
_CONSISTENT = "START TRANSACTION WITH CONSISTENT SNAPSHOT"


@dataclass(frozen=True, slots=True)
class GtidSnapshot:
    """The snapshot just after the commit with the sequence number ``high``."""

    high: int

    def sees(self, scn: int, txid: str) -> bool:
        """Whether a commit shows in the snapshot."""
        return scn <= self.high


@dataclass(frozen=True, slots=True)
class DomainNumbering:
    """MariaDB: the sequence number within one domain is the scn."""

    domain_id: int

    def clock(self, name: str) -> str:
        """``mariadb:<domain>:<clock name>``."""
        return f"mariadb:{self.domain_id}:{name}"

    def head(self, connection: MySqlConnection) -> int:
        """The domain's last sequence number."""
        return binlog_positions.head_scn(connection, self.domain_id)

    def beginning(self, connection: MySqlConnection) -> MySqlResumeState:
        """The number, and what was written in other domains until now."""
        return MySqlResumeState(self.head(connection), foreign=self.foreign(connection))

    def foreign(self, connection: MySqlConnection) -> str:
        """The last GTID of each other domain and server."""
        state = str(connection.row("SELECT @@global.gtid_binlog_state")[0] or "")
        own = f"{self.domain_id}-"
        return ",".join(gtid for gtid in state.split(",") if not gtid.startswith(own))

    def shows(self, connection: MySqlConnection, group: SuspendingGroup) -> bool:
        """A snapshot's place in the binlog has come behind the group's beginning."""
        with self.snapshot(connection) as place:
            assert isinstance(place, LocatedSnapshot)
            shown = BinlogLocation.of(place.file, place.offset)
        return shown > BinlogLocation.of(group.file, group.offset)

    def dump_after(
        self, connection: MySqlConnection, settings: MySqlSettings, resume_state: MySqlResumeState
    ) -> DumpStart:
        """From the last transaction on, or from the beginning of a file."""
        begins = binlog_positions.beginning_for(connection, settings, self.domain_id, resume_state)
        mark = resume_state.mark
        return DumpStart(
            BinlogRequest(begins.file, begins.offset),
            mark if mark is not None and mark.scn > begins.after_scn else None,
            begins_after=begins.after_scn,
        )

    def decoder(
        self,
        settings: MySqlSettings,
        charsets: Charsets,
        catalogue: Catalogue,
        resume_state: MySqlResumeState,
    ) -> BinlogDecoder:
        """The reader of MariaDB's groups."""
        made = BinlogDecoder(settings, charsets, catalogue, self.domain_id, resume_state.scn)
        made.foreign = ForeignGtids(resume_state.foreign or "")
        return made

    @contextmanager
    def snapshot(self, connection: MySqlConnection) -> Iterator[Snapshot]:
        """The server names the snapshot's place in the binlog; what lies before it, the stream."""
        connection.query(_REPEATABLE)
        with transaction(connection, _CONSISTENT):
            place = {
                str(name).lower(): value
                for name, value in connection.query("SHOW STATUS LIKE 'binlog_snapshot_%'")
            }
            file = str(place["binlog_snapshot_file"])
            yield LocatedSnapshot(file, int(place["binlog_snapshot_position"]))

    def located(self, connection: MySqlConnection, snapshot: LocatedSnapshot) -> GtidSnapshot:
        """The same snapshot by its GTID, where the stream cannot tell: the server looks it up."""
        return GtidSnapshot(
            binlog_positions.scn_of_snapshot(
                connection, snapshot.file, snapshot.offset, self.domain_id
            )
        )

    def facts(self, connection: MySqlConnection) -> dict[str, Any]:
        """The domain and the binlog's position."""
        return {
            "domain_id": self.domain_id,
            "gtid_binlog_pos": connection.row("SELECT @@global.gtid_binlog_pos")[0],
        }


@dataclass(frozen=True, slots=True)
class WatermarkedSnapshot:
    """A snapshot taken after every commit in ``executed`` and before all those after ``high``.

    Of the commits between the two it may show some; they count as not shown, for the stream
    carries what they did.
    """

    uuids: tuple[str, ...]
    executed: GtidSet
    high: int

    def sees(self, scn: int, txid: str) -> bool:
        """Whether a commit certainly shows in the snapshot."""
        return gtid_sets.holds(
            self.executed.get(self.uuids[gtid_sets.generation_of(scn)], ()),
            gtid_sets.number_of(scn),
        )


@dataclass(frozen=True, slots=True)
class UuidNumbering:
    """MySQL: the numbers of the servers that have written, one server after the other."""

    uuids: tuple[str, ...]
    promotion: Promotion = field(default_factory=Promotion, compare=False)

    def clock(self, name: str) -> str:
        """``mysql:<first uuid>:<clock name>``."""
        return f"mysql:{self.uuids[0]}:{name}"

    def head(self, connection: MySqlConnection) -> int:
        """The newest GTID of the last server that has written."""
        return self._head(connection, executed_gtids(connection))

    def beginning(self, connection: MySqlConnection) -> MySqlResumeState:
        """With what was written under tags until now: a dump has that, or nobody wants it."""
        executed = executed_gtids(connection)
        head = self._head(connection, executed)
        tagged = gtid_sets.tagged_in(executed, self.uuids)
        missed = self._missed(connection, executed)
        return MySqlResumeState(
            head,
            tagged=gtid_sets.told(tagged),
            missed=gtid_sets.told(missed),
            foreign=gtid_sets.told(gtid_sets.foreign_in(executed, self.uuids)),
        )

    def foreign(self, connection: MySqlConnection) -> str:
        """What servers that are not configured have written."""
        return gtid_sets.told(gtid_sets.foreign_in(executed_gtids(connection), self.uuids))

    def shows(self, connection: MySqlConnection, group: SuspendingGroup) -> bool:
        """The server counts it among the executed ones."""
        query = "SELECT GTID_SUBSET(%s, @@global.gtid_executed)"
        return bool(int(connection.row(query, (group.gtid,))[0]))

    def _missed(self, connection: MySqlConnection, executed: GtidSet) -> GtidSet:
        """The numbers that are free before larger ones of the set.

        With ``binlog_order_commits = OFF`` one of them may be in its commit: that is waited for.
        """
        missed = {
            name: gtid_sets.without(((1, gtid_sets.largest(executed[name])),), executed[name])
            for name in self.uuids
            if name in executed
        }
        until_s = time.monotonic() + _COMMITTED_WITHIN_S
        while any(missed.values()):
            owned, now = owned_gtids(connection), executed_gtids(connection)
            missed = {name: gtid_sets.without(missed[name], now.get(name, ())) for name in missed}
            if time.monotonic() >= until_s or not any(
                gtid_sets.common(missed[name], owned.get(name, ())) for name in missed
            ):
                break
            time.sleep(_ASKED_EVERY_S)
        return missed

    def _head(self, connection: MySqlConnection, executed: GtidSet) -> int:
        """The same of a set; what a replica has written for itself is not the newest."""
        own = own_uuid(connection) if len(self.uuids) > 1 else ""
        if own not in self.uuids:
            return gtid_sets.head_of(executed, self.uuids)
        others = {name: intervals for name, intervals in executed.items() if name != own}
        before = gtid_sets.head_of(others, self.uuids)
        if is_replicating(connection):
            self.promotion.ended_scn = None
            return before
        self.promotion.ended_scn = before
        return gtid_sets.head_of(executed, self.uuids)

    def dump_after(
        self, connection: MySqlConnection, settings: MySqlSettings, resume_state: MySqlResumeState
    ) -> DumpStart:
        """By the set of what has been seen; the server finds the place.

        A commit can be streamed before the server counts it among the executed ones.
        """
        after_scn = resume_state.scn
        executed = come_gtids(connection, resume_state.missed)
        where = f"{settings.host}:{settings.port} (database={settings.name})"
        head = self._head(connection, executed)
        if self._number_in(executed, after_scn) < gtid_sets.number_of(after_scn):
            raise SourcePositionLost(
                f"we are at scn {self._told(after_scn)}, but {where} has only come to "
                f"{self._told(head)}; it was reset, restored from a backup, or is a replica that "
                "lags behind or was promoted without the last transactions of its primary"
            )
        purged = gtid_sets.parse_gtid_set(str(connection.row("SELECT @@global.gtid_purged")[0]))
        seen = gtid_sets.seen_at(executed, purged, self.uuids, after_scn, resume_state.ends)
        # While something of our server is left, what its successor has purged before that was
        # written before it took over.
        more = self._number_in(purged, after_scn) < self._number_in(executed, after_scn)
        for generation, name in enumerate(self.uuids):
            last = gtid_sets.largest(purged.get(name, ()))
            if generation > gtid_sets.generation_of(after_scn) and more:
                continue
            if last > gtid_sets.largest(seen.get(name, ())):
                raise SourcePositionLost(
                    f"we are at scn {self._told(after_scn)}, but {where} has purged its binlog "
                    f"up to {name}:{last}. It reaches to {self._told(head)}"
                )
        seen = gtid_sets.seen_at(
            executed, purged, self.uuids, resume_state.read_from, resume_state.ends
        )
        for name, before in gtid_sets.parse_gtid_set(resume_state.tagged).items():
            known = gtid_sets.common(executed.get(name, ()), before)
            seen[name] = gtid_sets.union(seen.get(name, ()), known)
        for name, missed in gtid_sets.parse_gtid_set(resume_state.missed).items():
            seen[name] = gtid_sets.without(seen.get(name, ()), missed)
        unread = self._without_foreign(seen, executed, purged, resume_state.foreign)
        ends = [gtid_sets.largest(seen.get(name, ())) for name in self.uuids]
        for generation in range(len(self.uuids)):
            if generation > gtid_sets.generation_of(resume_state.read_from):
                ends[generation] = 0
            if generation == gtid_sets.generation_of(after_scn):
                ends[generation] = gtid_sets.number_of(after_scn)
        for name in self.uuids:
            seen[name] = gtid_sets.union(seen.get(name, ()), purged.get(name, ()))
        seen = {name: intervals for name, intervals in seen.items() if intervals}
        request = BinlogRequest("", binlog_positions.FIRST_OFFSET, gtid_sets.encode_gtid_set(seen))
        return DumpStart(
            request,
            self._expected(resume_state.mark, purged),
            resume_state.read_from,
            tuple(ends),
            unread=gtid_sets.told(unread),
        )

    def _without_foreign(
        self, seen: GtidSet, executed: GtidSet, purged: GtidSet, foreign: str | None
    ) -> GtidSet:
        """Leave in ``seen`` what was read of servers that are not configured, or is purged.

        Returns what is purged and was not read, of servers of which something was.
        """
        if foreign is None:
            return {}
        read, unread = gtid_sets.parse_gtid_set(foreign), {}
        for name in gtid_sets.foreign_in(executed, self.uuids):
            gone, known = purged.get(name, ()), read.get(name, ())
            seen[name] = gtid_sets.union(gtid_sets.common(executed[name], known), gone)
            if known and (lost := gtid_sets.without(gone, known)):
                unread[name] = lost
        return unread

    def _number_in(self, gtids: GtidSet, scn: int) -> int:
        """The largest number in a set of the server that ``scn`` belongs to."""
        generation = gtid_sets.generation_of(scn)
        name = self.uuids[generation] if generation < len(self.uuids) else ""
        return gtid_sets.largest(gtids.get(name, ()))

    def _expected(self, mark: LineageMark | None, purged: GtidSet) -> LineageMark | None:
        if mark is None:
            return None
        name = self.uuids[gtid_sets.generation_of(mark.scn)]
        held = gtid_sets.holds(purged.get(name, ()), gtid_sets.number_of(mark.scn))
        return None if held else mark

    def _told(self, scn: int) -> str:
        generation = gtid_sets.generation_of(scn)
        name = self.uuids[generation] if generation < len(self.uuids) else "an unknown server"
        return f"{scn} (GTID {name}:{gtid_sets.number_of(scn)})"

    def decoder(
        self,
        settings: MySqlSettings,
        charsets: Charsets,
        catalogue: Catalogue,
        resume_state: MySqlResumeState,
    ) -> BinlogDecoder:
        """The reader of MySQL's groups."""
        made = MySqlDecoder(
            settings, charsets, catalogue, self.uuids, resume_state.scn, self.promotion
        )
        made.continue_from(resume_state)
        return made

    @contextmanager
    def snapshot(self, connection: MySqlConnection) -> Iterator[Snapshot]:
        """Bracketed: the server cannot name the place.

        A commit is owned, shows, and is executed, in this order: none that shows is missing.
        """
        connection.query(_REPEATABLE)
        before = executed_gtids(connection)
        with transaction(connection, _CONSISTENT):
            after = come_gtids(connection)
            yield WatermarkedSnapshot(self.uuids, before, self._head(connection, after))

    def facts(self, connection: MySqlConnection) -> dict[str, Any]:
        """The servers that count, and what is executed."""
        return {
            "uuids": list(self.uuids),
            "gtid_executed": str(connection.row("SELECT @@global.gtid_executed")[0]),
        }


def executed_gtids(connection: MySqlConnection) -> dict[str, Intervals]:
    """``@@gtid_executed``."""
    return gtid_sets.parse_gtid_set(str(connection.row("SELECT @@global.gtid_executed")[0]))


def owned_gtids(connection: MySqlConnection) -> GtidSet:
    """``@@gtid_owned``: what is being committed, or taken for later."""
    return gtid_sets.parse_owned(str(connection.row("SELECT @@global.gtid_owned")[0]))


def come_gtids(connection: MySqlConnection, missed: str = "") -> GtidSet:
    """What is executed, and what is being committed, which the binlog may have already.

    What is owned is asked for first: in this order nothing can be in neither.  A number of
    ``missed`` that is owned is no commit in its turn: a session has taken it for later.
    """
    owned, executed = owned_gtids(connection), executed_gtids(connection)
    later = gtid_sets.parse_gtid_set(missed)
    for name, intervals in owned.items():
        coming = gtid_sets.without(intervals, later.get(name, ()))
        executed[name] = gtid_sets.union(executed.get(name, ()), coming)
    return executed


def own_uuid(connection: MySqlConnection) -> str:
    """The server's own UUID."""
    return str(connection.row("SELECT @@server_uuid")[0]).lower()


def has_prepared(connection: MySqlConnection) -> bool:
    """Whether XA transactions are prepared now; False too where we may not ask."""
    try:
        return bool(connection.query("XA RECOVER"))
    except ServerError:
        return False
