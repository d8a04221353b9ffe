"""Differences of MariaDB's and MySQL's GTIDs: clock, positions, binlog dump and snapshots."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from databus.common.errors import SourcePositionLost
from databus.relay.sources.contract import ScnSnapshot, Snapshot
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

# A commit takes milliseconds; a session that owns a number for longer has reserved it.
_COMMITTED_WITHIN_S = 5.0
_ASKED_EVERY_S = 0.01


@dataclass(frozen=True, slots=True)
class DumpStart:
    """The binlog dump to request, and the transaction expected in it.

    ``expected`` is None if that one was purged: then histories cannot be compared.
    ``after_scn``: no transaction up to there may come; 0 if files are read from their
    beginning.  ``begins_after``: the first transaction follows one at or before this scn.
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
        """The resume state of a new stream that begins now, after ``head``."""

    def foreign(self, connection: MySqlConnection) -> str:
        """The GTIDs of other domains or servers so far, in the server's form."""

    def shows(self, connection: MySqlConnection, group: SuspendingGroup) -> bool:
        """Whether a snapshot taken now shows a group that has no scn."""

    def dump_after(
        self, connection: MySqlConnection, settings: MySqlSettings, resume_state: MySqlResumeState
    ) -> DumpStart:
        """The request for everything after a resume state's scn, and earlier events it needs.

        Raises:
            SourcePositionLost: the server no longer has the position, or not yet.
        """

    def decoder(
        self,
        settings: MySqlSettings,
        charsets: Charsets,
        catalogue: Catalogue,
        resume_state: MySqlResumeState,
    ) -> BinlogDecoder:
        """The decoder of that request's stream."""

    def snapshot(self, connection: MySqlConnection) -> AbstractContextManager[Snapshot]:
        """A context with a transaction that reads one snapshot."""

    def facts(self, connection: MySqlConnection) -> dict[str, Any]:
        """For the status: the server's positions."""


@contextmanager
def transaction(connection: MySqlConnection, begin: str) -> Iterator[None]:
    """A context with a read transaction that ``begin`` opens; it is rolled back at the end,
    unless the connection was closed, which also rolls it back."""
    connection.query(begin)
    try:
        yield
    finally:
        if connection.is_open:
            connection.query("ROLLBACK")


_REPEATABLE = "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ"
_CONSISTENT = "START TRANSACTION WITH CONSISTENT SNAPSHOT"


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
        """The resume state of a new stream; it leaves out the GTIDs of other domains so far."""
        return MySqlResumeState(self.head(connection), foreign=self.foreign(connection))

    def foreign(self, connection: MySqlConnection) -> str:
        """The last GTID of each other domain and server."""
        state = str(connection.row("SELECT @@global.gtid_binlog_state")[0] or "")
        own = f"{self.domain_id}-"
        return ",".join(gtid for gtid in state.split(",") if not gtid.startswith(own))

    def shows(self, connection: MySqlConnection, group: SuspendingGroup) -> bool:
        """Whether a snapshot's binlog position is after the group's beginning."""
        with self.snapshot(connection) as location:
            assert isinstance(location, LocatedSnapshot)
            shown = BinlogLocation.of(location.file, location.offset)
        return shown > BinlogLocation.of(group.file, group.offset)

    def dump_after(
        self, connection: MySqlConnection, settings: MySqlSettings, resume_state: MySqlResumeState
    ) -> DumpStart:
        """Request the binlog from the last transaction on, or from the beginning of a file."""
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
        """The decoder of MariaDB's groups."""
        made = BinlogDecoder(settings, charsets, catalogue, self.domain_id, resume_state.scn)
        made.progress.foreign = ForeignGtids(resume_state.foreign or "")
        return made

    @contextmanager
    def snapshot(self, connection: MySqlConnection) -> Iterator[Snapshot]:
        """The server gives the snapshot's binlog position; the stream gives the scn before it."""
        connection.query(_REPEATABLE)
        with transaction(connection, _CONSISTENT):
            location = {
                str(name).lower(): value
                for name, value in connection.query("SHOW STATUS LIKE 'binlog_snapshot_%'")
            }
            file = str(location["binlog_snapshot_file"])
            yield LocatedSnapshot(file, int(location["binlog_snapshot_position"]))

    def located(self, connection: MySqlConnection, snapshot: LocatedSnapshot) -> ScnSnapshot:
        """The same snapshot with its GTID from the server, if the stream does not have it."""
        return ScnSnapshot(
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

    Some of the commits between the two may be visible; they count as not visible, because the
    stream has their changes.
    """

    uuids: tuple[str, ...]
    executed: GtidSet
    high: int

    def sees(self, scn: int, txid: str) -> bool:
        """Whether a commit is certainly visible in the snapshot."""
        return gtid_sets.holds(
            self.executed.get(self.uuids[gtid_sets.generation_of(scn)], ()),
            gtid_sets.number_of(scn),
        )


@dataclass(frozen=True, slots=True)
class UuidNumbering:
    """MySQL: the GTID numbers of the servers that have written, one server after the other."""

    uuids: tuple[str, ...]
    promotion: Promotion = field(default_factory=Promotion, compare=False)

    def clock(self, name: str) -> str:
        """``mysql:<first uuid>:<clock name>``."""
        return f"mysql:{self.uuids[0]}:{name}"

    def head(self, connection: MySqlConnection) -> int:
        """The newest GTID of the last server that has written."""
        return self._head(connection, executed_gtids(connection))

    def beginning(self, connection: MySqlConnection) -> MySqlResumeState:
        """The resume state of a new stream; it has the tagged GTIDs so far, which it leaves out."""
        executed = executed_gtids(connection)
        head = self._head(connection, executed)
        tagged = gtid_sets.tagged_in(executed, self.uuids)
        missed = self._missed(connection, executed)
        return MySqlResumeState(
            head,
            tagged=gtid_sets.as_text(tagged),
            missed=gtid_sets.as_text(missed),
            foreign=gtid_sets.as_text(gtid_sets.foreign_in(executed, self.uuids)),
        )

    def foreign(self, connection: MySqlConnection) -> str:
        """The GTIDs of servers that are not configured."""
        return gtid_sets.as_text(gtid_sets.foreign_in(executed_gtids(connection), self.uuids))

    def shows(self, connection: MySqlConnection, group: SuspendingGroup) -> bool:
        """Whether the group's GTID is in gtid_executed."""
        query = "SELECT GTID_SUBSET(%s, @@global.gtid_executed)"
        return bool(int(connection.row(query, (group.gtid,))[0]))

    def _missed(self, connection: MySqlConnection, executed: GtidSet) -> GtidSet:
        """The unused numbers below the largest one of the set.

        With ``binlog_order_commits = OFF`` one of them may be committing: this waits for it.
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
        """The newest scn of a set; a replica's own transactions do not count."""
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
        """Request by the set of seen GTIDs; the server finds the position.

        The server can stream a commit before its GTID is in gtid_executed.
        """
        after_scn = resume_state.scn
        executed = come_gtids(connection, resume_state.missed)
        where = f"{settings.host}:{settings.port} (database={settings.name})"
        head = self._head(connection, executed)
        if self._number_in(executed, after_scn) < gtid_sets.number_of(after_scn):
            raise SourcePositionLost(
                f"the relay is at scn {self._described(after_scn)}, but {where} has only reached "
                f"{self._described(head)}; it was reset, restored from a backup, or is a "
                "replica that lags behind or was promoted without the last transactions of its "
                "primary"
            )
        purged = gtid_sets.parse_gtid_set(str(connection.row("SELECT @@global.gtid_purged")[0]))
        seen = gtid_sets.seen_at(executed, purged, self.uuids, after_scn, resume_state.ends)
        # While the binlog has transactions of this server, anything that its successor has purged
        # before them was written before the takeover.
        more = self._number_in(purged, after_scn) < self._number_in(executed, after_scn)
        for generation, name in enumerate(self.uuids):
            last = gtid_sets.largest(purged.get(name, ()))
            if generation > gtid_sets.generation_of(after_scn) and more:
                continue
            if last > gtid_sets.largest(seen.get(name, ())):
                raise SourcePositionLost(
                    f"the relay is at scn {self._described(after_scn)}, but {where} has purged "
                    f"its binlog up to {name}:{last}. It reaches to {self._described(head)}"
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
            unread=gtid_sets.as_text(unread),
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

    def _described(self, scn: int) -> str:
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
        """The decoder of MySQL's groups."""
        made = MySqlDecoder(
            settings, charsets, catalogue, self.uuids, resume_state.scn, self.promotion
        )
        made.continue_from(resume_state)
        return made

    @contextmanager
    def snapshot(self, connection: MySqlConnection) -> Iterator[Snapshot]:
        """A snapshot between two GTID sets: the server cannot give its position.

        A commit is first owned, then visible, then executed: no visible one is missing.
        """
        connection.query(_REPEATABLE)
        before = executed_gtids(connection)
        with transaction(connection, _CONSISTENT):
            after = come_gtids(connection)
            yield WatermarkedSnapshot(self.uuids, before, self._head(connection, after))

    def facts(self, connection: MySqlConnection) -> dict[str, Any]:
        """The configured servers, and the executed GTIDs."""
        return {
            "uuids": list(self.uuids),
            "gtid_executed": str(connection.row("SELECT @@global.gtid_executed")[0]),
        }


def executed_gtids(connection: MySqlConnection) -> dict[str, Intervals]:
    """``@@gtid_executed``."""
    return gtid_sets.parse_gtid_set(str(connection.row("SELECT @@global.gtid_executed")[0]))


def owned_gtids(connection: MySqlConnection) -> GtidSet:
    """``@@gtid_owned``: the GTIDs that are being committed, or that a session has reserved."""
    return gtid_sets.parse_owned(str(connection.row("SELECT @@global.gtid_owned")[0]))


def come_gtids(connection: MySqlConnection, missed: str = "") -> GtidSet:
    """The executed GTIDs and those being committed, which the binlog may have already.

    The owned ones are read first: in this order no commit can be in neither set.  An owned number
    in ``missed`` is no commit in order: a session has reserved it.
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
    """Whether XA transactions are prepared now; False also without the privilege to list them."""
    try:
        return bool(connection.query("XA RECOVER"))
    except ServerError:
        return False
