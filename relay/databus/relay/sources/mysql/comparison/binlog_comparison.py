"""Compares the windows of a ring with the transactions that python-mysql-replication reads.

It compares the rows of each transaction in order: operation, table, key, and the values that have
a common form in both.  Other values are counted.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from databus.common.checkpoint import Position
from databus.common.config import DatabaseConfig
from databus.common.errors import PreflightFailed, ScnTooOld, StoreError, UnsupportedChange
from databus.common.frame import frame_format
from databus.common.frame.frame_format import OP_LETTERS, FrameView, Op
from databus.relay.ring.ring_reader import RingReader
from databus.relay.ring.schema_registry import RegistryReader
from databus.relay.sources.mysql.binlog.gtid_numbering import executed_gtids
from databus.relay.sources.mysql.comparison.library_reader import (
    UNREAD,
    LibraryChange,
    LibraryTransaction,
    transactions_after,
)
from databus.relay.sources.mysql.gtid import gtid_sets
from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection
from databus.relay.sources.mysql.protocol.mysql_settings import read_settings

_READ_BYTES = 4 << 20
_PLAIN = (int, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class StoredChange:
    """A row as the ring has it."""

    op: str
    source: str
    key: Mapping[str, Any]
    after: Mapping[str, Any] | None


@dataclass(slots=True)
class StoredWindow:
    """A transaction of the source as the ring has it."""

    scn: int
    gtid: str
    changes: list[StoredChange] = field(default_factory=list)


@dataclass(slots=True)
class Comparison:
    """What was compared, and the first ``MOST`` differences as text."""

    MOST = 100

    transactions: int = 0
    rows: int = 0
    values: int = 0
    values_not_compared: int = 0
    transactions_not_compared: Counter[str] = field(default_factory=Counter)
    difference_count: int = 0
    differences: list[str] = field(default_factory=list)

    def differs(self, what: str) -> None:
        """Record a difference."""
        self.difference_count += 1
        if len(self.differences) < self.MOST:
            self.differences.append(what)

    def document(self) -> dict[str, Any]:
        """For ``databus inspect``."""
        return {
            "transactions": self.transactions,
            "rows": self.rows,
            "values": self.values,
            "values_not_compared": self.values_not_compared,
            "transactions_not_compared": dict(self.transactions_not_compared),
            "differences": self.difference_count,
        }


def compare(
    config: DatabaseConfig, folder: Path, after_scn: int | None, upto_scn: int | None
) -> Comparison:
    """Compare the windows of the ring in ``folder`` with the binlog of its source.

    ``after_scn`` None begins after the ring's first window, ``upto_scn`` None ends at its last.

    Raises:
        UnsupportedChange: the server has tagged GTIDs, or the library fails at an event.
        PreflightFailed: the binlog does not name its columns.
        ScnTooOld: the ring no longer has ``after_scn``.
        StoreError: the ring has fewer than two windows of the source.
        SourceUnavailable: see ``transactions_after``.
    """
    settings = read_settings(config)
    windows = stored_windows(folder, after_scn, upto_scn)
    first = next(windows, None)
    if first is None:
        raise StoreError(f"{folder}: the ring has no window of a transaction in this range")
    connection = MySqlConnection(settings)
    try:
        if str(connection.row("SELECT @@global.binlog_row_metadata")[0]) != "FULL":
            raise PreflightFailed(
                "mysql-replication reads column names only from the binlog: "
                "SET GLOBAL binlog_row_metadata = FULL"
            )
        position = _behind(first.gtid, connection)
    finally:
        connection.close()
    found = Comparison()
    ruled = bool(
        config.hash_columns or config.mask_columns or config.null_columns or config.truncate_columns
    )
    theirs = transactions_after(settings, position, settings.captures)
    skipped = frozenset(config.skipped_operations)
    for ours in windows:
        for transaction in theirs:
            if transaction.gtid == ours.gtid:
                _compare(ours, transaction, skipped, found, with_values=not ruled)
                break
            if is_before(transaction.gtid, ours.gtid):
                _note_missing(transaction, skipped, found)
            elif _server_of(transaction.gtid) == _server_of(ours.gtid):
                raise StoreError(
                    f"the ring has GTID {ours.gtid}; the binlog continues with {transaction.gtid}"
                )
    theirs.close()
    return found


def stored_windows(
    folder: Path, after_scn: int | None, upto_scn: int | None
) -> Iterator[StoredWindow]:
    """The source's windows from ``after_scn`` on, without those of dumps and of the relay."""
    registry = RegistryReader(folder / "schemas.jsonl")
    registry.refresh()
    with RingReader(folder) as ring:
        state = ring.snapshot()
        cursor = state.head
        if after_scn is not None:
            if after_scn < state.prev.scn:
                raise ScnTooOld(
                    f"{folder}: the ring begins after scn {state.prev.scn}, {after_scn} is gone"
                )
            cursor = ring.find(Position(max(0, after_scn - 1)))
        changes = list[StoredChange]()
        while cursor < state.tail:
            frames, cursor = ring.read(cursor, _READ_BYTES)
            for view in frame_format.iter_frames(bytes(frames)):
                if view.op == Op.END_OF_WINDOW:
                    gtid, window = bytes(view.key).decode(), changes
                    changes = []
                    if upto_scn is not None and view.scn > upto_scn:
                        return
                    if gtid:
                        yield StoredWindow(view.scn, gtid, window)
                elif not (view.is_control or view.op == Op.TRUNCATE):
                    changes.append(_stored(view, registry))


def _stored(view: FrameView, registry: RegistryReader) -> StoredChange:
    schema = registry.schemas.by_fingerprint(view.schema_fp)
    after = None
    if view.after is not None:
        after = schema.decode_row(view.after)
        for name in schema.absent_names(view.absent):
            after.pop(name, None)
    key = schema.decode_key(view.key)
    return StoredChange(OP_LETTERS[view.op], schema.source, key, after)


def _behind(gtid: str, connection: MySqlConnection) -> dict[str, Any]:
    """The library's position after a transaction.

    It is after all transactions of other servers and domains, which the server may have purged.
    """
    server, number = _server_of(gtid), _number_of(gtid)
    if ":" not in gtid:
        newest = str(connection.row("SELECT @@global.gtid_binlog_pos")[0] or "").split(",")
        others = [one for one in newest if one and _server_of(one) != server]
        return {"auto_position": ",".join([gtid, *others]), "is_mariadb": True}
    executed = executed_gtids(connection)
    if tagged := [name for name in executed if ":" in name]:
        raise UnsupportedChange(
            f"mysql-replication does not read tagged GTIDs, which this server has: {tagged[0]}"
        )
    seen = dict(executed)
    seen[server] = gtid_sets.clipped(executed.get(server, ()), number)
    return {"auto_position": gtid_sets.as_text(seen)}


def _server_of(gtid: str) -> str:
    """MySQL's UUID, MariaDB's domain."""
    return gtid.partition(":")[0] if ":" in gtid else gtid.partition("-")[0]


def _number_of(gtid: str) -> int:
    return int(gtid.rpartition(":" if ":" in gtid else "-")[2])


def is_before(gtid: str, other: str) -> bool:
    """Whether both are of one server or domain and ``gtid`` is the earlier one."""
    return _server_of(gtid) == _server_of(other) and _number_of(gtid) < _number_of(other)


def _note_missing(
    transaction: LibraryTransaction, skipped: frozenset[str], found: Comparison
) -> None:
    changes = [change for change in transaction.changes if change.op not in skipped]
    if changes:
        tables = ", ".join(sorted({change.source for change in changes}))
        found.differs(
            f"GTID {transaction.gtid}: the ring has no window, the binlog {len(changes)} rows "
            f"of {tables}"
        )


def _compare(
    ours: StoredWindow,
    theirs: LibraryTransaction,
    skipped: frozenset[str],
    found: Comparison,
    *,
    with_values: bool,
) -> None:
    found.transactions += 1
    if theirs.unread:
        found.transactions_not_compared[theirs.unread] += 1
        return
    stored = [change for change in ours.changes if change.op in "cud"]
    keys = {change.source: tuple(change.key) for change in stored}
    read = [
        part
        for change in theirs.changes
        for part in _split(change, keys.get(change.source, ()))
        if part.op not in skipped
    ]
    found.rows += len(stored)
    if len(read) != len(stored):
        counts = {
            who: dict(Counter((one.op, one.source) for one in changes))
            for who, changes in (("ring", stored), ("binlog", read))
        }
        held, logged = counts["ring"], counts["binlog"]
        found.differs(f"GTID {ours.gtid}: the ring has {held}, the binlog {logged}")
        return
    for one, other in zip(stored, read, strict=True):
        where = f"GTID {ours.gtid}: {one.op} of {one.source} {dict(one.key)}"
        if (one.op, one.source) != (other.op, other.source):
            found.differs(f"{where}: the binlog has {other.op} of {other.source}")
            continue
        if with_values:
            image = other.after if other.after is not None else other.before
            _compare_values(where, {**one.key, **(one.after or {})}, image or {}, found)


def _split(change: LibraryChange, key: tuple[str, ...]) -> Iterator[LibraryChange]:
    """An update that changes the key becomes a delete and an insert, as in the stream."""
    before, after = change.before, change.after
    if (
        before is not None
        and after is not None
        and any(before.get(name) != after.get(name) for name in key)
    ):
        yield LibraryChange("d", change.source, before, None)
        yield LibraryChange("c", change.source, None, after)
    else:
        yield change


def _compare_values(
    where: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], found: Comparison
) -> None:
    for name, value in ours.items():
        one, other = plain(value), plain(theirs.get(name, UNREAD))
        of_one_type = type(one) is type(other) or None in (one, other)
        # The library has None for JSON's null too.
        if not of_one_type or UNREAD in (one, other) or (one, other) == ("null", None):
            found.values_not_compared += 1
            continue
        found.values += 1
        if one != other:
            held, logged = repr(one)[:80], repr(other)[:80]
            found.differs(f"{where}: {name} is {held} in the ring, {logged} in the binlog")


def plain(value: Any) -> Any:
    """A value in a form that the ring and the library have in common; ``UNREAD`` if there is none.

    Trailing zero bytes are removed: the binlog omits them in BINARY columns.
    """
    if isinstance(value, bytes):
        return value.rstrip(b"\0")
    if type(value) is dt.date:
        return value.isoformat()
    return value if type(value) in _PLAIN else UNREAD
