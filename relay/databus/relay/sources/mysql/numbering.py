"""What tells MariaDB's GTIDs from MySQL's: the clock, the positions, the dump, the snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from databus.common.errors import SourcePositionLost
from databus.relay.sources.mysql import gtid_sets, positions
from databus.relay.sources.mysql.charsets import Charsets
from databus.relay.sources.mysql.connection import BinlogRequest, Connection, ServerError
from databus.relay.sources.mysql.decoder import BinlogDecoder
from databus.relay.sources.mysql.gtid_sets import GtidSet, Intervals
from databus.relay.sources.mysql.lineage import Mark, Memo
from databus.relay.sources.mysql.mysql_decoder import MySqlDecoder
from databus.relay.sources.mysql.settings import Settings
from databus.relay.sources.mysql.tables import Catalogue
from databus.relay.sources.source import Snapshot


@dataclass(frozen=True, slots=True)
class DumpStart:
    """What to ask the server for, and the transaction to recognise in what comes.

    ``expected`` is None where that one was purged: then nothing tells histories apart.
    """

    request: BinlogRequest
    expected: Mark | None


class Numbering(Protocol):
    """How a server numbers its transactions."""

    def clock(self, name: str) -> str:
        """The clock's identity."""

    def head(self, connection: Connection) -> int:
        """The scn of the last transaction."""

    def dump_after(self, connection: Connection, settings: Settings, memo: Memo) -> DumpStart:
        """The request for everything after a memo's scn, and what it needs before that.

        Raises:
            SourcePositionLost: the server no longer has it, or does not have it yet.
        """

    def decoder(
        self, settings: Settings, charsets: Charsets, catalogue: Catalogue, after_scn: int
    ) -> BinlogDecoder:
        """The reader of what that request brings."""

    def snapshot(self, connection: Connection) -> AbstractContextManager[Snapshot]:
        """A transaction that reads at one point, for as long as the context is open."""

    def facts(self, connection: Connection) -> dict[str, Any]:
        """For the status: what the server says of its positions."""


@contextmanager
def transaction(connection: Connection, begin: str) -> Iterator[None]:
    """A read transaction that ``begin`` opens; it is rolled back at the end."""
    connection.query(begin)
    try:
        yield
    finally:
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

    def head(self, connection: Connection) -> int:
        """The domain's last sequence number."""
        return positions.head_scn(connection, self.domain_id)

    def dump_after(self, connection: Connection, settings: Settings, memo: Memo) -> DumpStart:
        """From the beginning of the file that holds the place."""
        file = positions.file_for(connection, settings, self.domain_id, memo)
        mark = memo.mark
        return DumpStart(
            BinlogRequest(file.name, positions.FIRST_OFFSET),
            mark if mark is not None and mark.scn > file.after_scn else None,
        )

    def decoder(
        self, settings: Settings, charsets: Charsets, catalogue: Catalogue, after_scn: int
    ) -> BinlogDecoder:
        """The reader of MariaDB's groups."""
        return BinlogDecoder(settings, charsets, catalogue, self.domain_id, after_scn)

    @contextmanager
    def snapshot(self, connection: Connection) -> Iterator[Snapshot]:
        """Exact: the server names the snapshot's place in the binlog."""
        connection.query(_REPEATABLE)
        with transaction(connection, _CONSISTENT):
            place = {
                str(name).lower(): value
                for name, value in connection.query("SHOW STATUS LIKE 'binlog_snapshot_%'")
            }
            file = str(place["binlog_snapshot_file"])
            offset = int(place["binlog_snapshot_position"])
            yield GtidSnapshot(positions.scn_of_snapshot(connection, file, offset, self.domain_id))

    def facts(self, connection: Connection) -> dict[str, Any]:
        """The domain and the binlog's position."""
        return {
            "domain_id": self.domain_id,
            "gtid_binlog_pos": connection.row("SELECT @@global.gtid_binlog_pos")[0],
        }


@dataclass(frozen=True, slots=True)
class BracketSnapshot:
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

    def clock(self, name: str) -> str:
        """``mysql:<first uuid>:<clock name>``."""
        return f"mysql:{self.uuids[0]}:{name}"

    def head(self, connection: Connection) -> int:
        """The newest GTID of the last server that has written."""
        return gtid_sets.head_of(executed_gtids(connection), self.uuids)

    def dump_after(self, connection: Connection, settings: Settings, memo: Memo) -> DumpStart:
        """By the set of what has been seen; the server finds the place."""
        after_scn = memo.scn
        executed = executed_gtids(connection)
        where = f"{settings.host}:{settings.port} (database={settings.name})"
        head = gtid_sets.head_of(executed, self.uuids)
        if after_scn > head:
            raise SourcePositionLost(
                f"we are at scn {self._told(after_scn)}, but {where} has only come to "
                f"{self._told(head)}; it was reset, restored from a backup, or is a replica that "
                "lags behind"
            )
        purged = gtid_sets.parse_gtid_set(str(connection.row("SELECT @@global.gtid_purged")[0]))
        seen = gtid_sets.seen_at(executed, purged, self.uuids, after_scn)
        for name in self.uuids:
            last = gtid_sets.largest(purged.get(name, ()))
            if last > gtid_sets.largest(seen.get(name, ())):
                raise SourcePositionLost(
                    f"we are at scn {self._told(after_scn)}, but {where} has purged its binlog "
                    f"up to {name}:{last}. It reaches to {self._told(head)}"
                )
        seen = gtid_sets.seen_at(executed, purged, self.uuids, memo.read_from)
        for name in self.uuids:
            seen[name] = gtid_sets.union(seen.get(name, ()), purged.get(name, ()))
        seen = {name: intervals for name, intervals in seen.items() if intervals}
        request = BinlogRequest("", positions.FIRST_OFFSET, gtid_sets.encode_gtid_set(seen))
        return DumpStart(request, self._expected(memo.mark, purged))

    def _expected(self, mark: Mark | None, purged: GtidSet) -> Mark | None:
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
        self, settings: Settings, charsets: Charsets, catalogue: Catalogue, after_scn: int
    ) -> BinlogDecoder:
        """The reader of MySQL's groups."""
        return MySqlDecoder(settings, charsets, catalogue, self.uuids, after_scn)

    @contextmanager
    def snapshot(self, connection: Connection) -> Iterator[Snapshot]:
        """Bracketed: the server cannot name the place.

        A commit is owned, shows, and is executed, in this order; so what is owned is asked for
        before what is executed, and no commit that shows can be in neither.
        """
        connection.query(_REPEATABLE)
        before = executed_gtids(connection)
        with transaction(connection, _CONSISTENT):
            owned = gtid_sets.parse_owned(str(connection.row("SELECT @@global.gtid_owned")[0]))
            after = executed_gtids(connection)
            for name, number in owned.items():
                after[name] = (*after.get(name, ()), (number, number))
            yield BracketSnapshot(self.uuids, before, gtid_sets.head_of(after, self.uuids))

    def facts(self, connection: Connection) -> dict[str, Any]:
        """The servers that count, and what is executed."""
        return {
            "uuids": list(self.uuids),
            "gtid_executed": str(connection.row("SELECT @@global.gtid_executed")[0]),
        }


def executed_gtids(connection: Connection) -> dict[str, Intervals]:
    """``@@gtid_executed``."""
    return gtid_sets.parse_gtid_set(str(connection.row("SELECT @@global.gtid_executed")[0]))


def own_uuid(connection: Connection) -> str:
    """The server's own UUID."""
    return str(connection.row("SELECT @@server_uuid")[0]).lower()


def has_prepared(connection: Connection) -> bool:
    """Whether XA transactions are prepared now; False too where we may not ask."""
    try:
        return bool(connection.query("XA RECOVER"))
    except ServerError:
        return False
