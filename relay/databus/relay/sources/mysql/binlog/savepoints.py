"""The rows that remain of a transaction after ROLLBACK or ROLLBACK TO in the binlog.

A server leaves rolled back rows out of its binlog.  MariaDB has an exception: the transaction
also created or dropped a temporary table, or wrote to a non-transactional table after a
savepoint.  Then ROLLBACK or ROLLBACK TO follows the rows that it undoes.  It does not undo rows
of non-transactional tables (MyISAM, Aria); the catalogue has the engines.
"""

from __future__ import annotations

from collections.abc import Iterable

from databus.common.frame import frame_format
from databus.relay.sources.mysql.binlog.xa_transactions import moved
from databus.relay.sources.mysql.tables.inferred_columns import LookaheadResult
from databus.relay.sources.mysql.tables.mysql_tables import TRANSACTIONAL_ENGINES

WHOLE, TO, SAVEPOINT = "ROLLBACK", "ROLLBACK TO ", "SAVEPOINT "


class Savepoints:
    """Where the savepoints of the open transaction were set.

    Owner: the stream's decoder.
    """

    def __init__(self) -> None:
        self._scn = 0
        self._seqs: dict[str, int] = {}

    def set(self, statement: str, scn: int, seq: int) -> None:
        """SAVEPOINT, after so many frames of the transaction."""
        if scn != self._scn:
            self._scn, self._seqs = scn, {}
        self._seqs[statement.strip()[len(SAVEPOINT) :].lower()] = seq

    def undone_from(self, statement: str, scn: int) -> int | None:
        """The first seq that ROLLBACK or ROLLBACK TO undoes; None if that is not known."""
        text = statement.strip()
        if text.upper() == WHOLE:
            return 0
        name = text[len(TO) :].lower().removeprefix(SAVEPOINT.lower())
        return self._seqs.get(name) if scn == self._scn else None


def undone(
    frames: bytes,
    next_seq: int,
    since_seq: int | None,
    sources: Iterable[str],
    lookahead: LookaheadResult,
) -> tuple[bytes, int, list[str]]:
    """The frames that remain of a transaction, all of them rows, if those since a seq are undone.

    ``next_seq`` is that of its next frame; frames before ``frames`` were already given out.
    ``sources`` are tables whose rows were read, ``lookahead`` is of the statement's position.

    Returns the frames, how many were removed, and the tables to suspend: those whose engine is
    not certain, because they were dropped or a later statement can have changed them.  If
    ``frames`` lacks some of the undone frames, they are also all transactional tables.
    """
    views = list(frame_format.iter_frames(frames))
    first_seq = views[0].seq if views else next_seq
    since = first_seq if since_seq is None else since_seq
    is_all = since_seq is not None and first_seq <= since_seq
    touched = {view.source_id for view in views if view.seq >= since}
    staying, suspended = set[int](), list[str]()
    for source in sorted(sources):
        source_id = frame_format.source_id(source)
        if is_all and source_id not in touched:
            continue
        table = lookahead.catalogue.get(source)
        if table is None or lookahead.changes(source):
            suspended.append(source)
        elif table.engine not in TRANSACTIONAL_ENGINES:
            staying.add(source_id)
        elif not is_all:
            suspended.append(source)
    if not is_all:
        return frames, 0, suspended
    left = [bytes(view.bytes) for view in views if view.seq < since]
    for view in views[len(left) :]:
        if view.source_id in staying:
            seq = first_seq + len(left)
            left.append(moved(bytearray(view.bytes), view.scn, seq, view.commit_us))
    return b"".join(left), len(views) - len(left), suspended
