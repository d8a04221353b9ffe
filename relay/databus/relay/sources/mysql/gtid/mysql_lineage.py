"""Which history of transactions we have read: what is remembered of it, and how it is told again.

A position is a number, and numbers begin anew after RESET MASTER, on another server, or on a
replica that was promoted without the last transactions of its primary.  So the last
transaction itself is remembered, as every server that has it shows it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from databus.common.errors import FormatError, SourcePositionLost
from databus.relay.sources.contract import Transaction
from databus.relay.sources.suspended_tables import TableSuspension


@dataclass(frozen=True, slots=True)
class LineageMark:
    """A transaction that we have read: who wrote it, and when.  It is the same on a replica.

    ``server_id`` is 0 where only the time is known.
    """

    scn: int
    server_id: int
    commit_us: int

    def is_same(self, other: LineageMark) -> bool:
        """Whether both can be the same transaction."""
        known = 0 not in (self.server_id, other.server_id)
        return (self.scn, self.commit_us) == (other.scn, other.commit_us) and not (
            known and self.server_id != other.server_id
        )

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.commit_us / 1e6, UTC).isoformat()
        return f"scn {self.scn} of server_id {self.server_id}, committed {when}"


def require_same(found: LineageMark, expected: LineageMark, place: str) -> None:
    """See to it that the transaction at ``place`` is the one that we remember.

    Raises:
        SourcePositionLost: it is another one.
    """
    if not found.is_same(expected):
        raise SourcePositionLost(
            f"{place}: this server's history is not the one that we have read: we know "
            f"{expected}, here is {found}. It was reset, is another server, or was promoted "
            "without the last transactions of its primary"
        )


@dataclass(frozen=True, slots=True)
class GroupLocation:
    """Where the group of a transaction begins in one server's binlog (MariaDB)."""

    scn: int
    server_id: int
    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class MySqlResumeState:
    """What is needed to go on after ``scn``, beyond that number.

    ``prepared`` is where the oldest XA transaction was prepared that is not completed yet. ``ends``
    (MySQL) are the last numbers that were read of each generation: by those before that of ``scn``
    a server is noticed that writes again after another one has taken over. ``stopped`` are the
    tables that are passed over.  ``tracked`` is what was certain, at ``tracked_scn``, of tables
    that the binlog does not name the columns of (``inferred_columns.py``). ``told`` are the
    definitions that consumers were told last (``sources/announced_schemas.py``). ``tagged`` and
    ``missed`` (MySQL, in the server's form) are the GTIDs under tags from before the first start,
    and the numbers that had not come when larger ones had (``out_of_order_gtids.py``). ``place`` is
    where the transaction ``mark`` begins, on the server that the stream came from. ``dropped`` are
    columns that statements dropped since the last certain definition of their table
    (``dropped_columns.py``). ``foreign`` are the GTIDs of other domains or servers that need not be
    read any more, in the server's form; None in what an earlier version has stored. ``unmet`` are
    captured names that could not be seen (``known_tables.py``).
    """

    scn: int
    mark: LineageMark | None = None
    prepared: int | None = None
    ends: tuple[int, ...] = ()
    stopped: Mapping[str, TableSuspension] = field(default_factory=dict)
    tracked: str = ""
    tracked_scn: int = 0
    told: str = ""
    tagged: str = ""
    missed: str = ""
    place: GroupLocation | None = None
    dropped: Mapping[str, Sequence[str]] = field(default_factory=dict)
    foreign: str | None = None
    unmet: tuple[str, ...] = ()

    @property
    def read_from(self) -> int:
        """The binlog is needed from after this scn on."""
        scns = [self.scn]
        if self.mark is not None:
            scns.append(self.mark.scn - 1)
        if self.prepared is not None:
            scns.append(self.prepared - 1)
        return max(0, min(scns))

    def encode(self) -> str:
        """As JSON."""
        mark, stopped = self.mark, sorted(self.stopped.items())
        return json.dumps(
            {
                "scn": self.scn,
                "mark": [mark.scn, mark.server_id, mark.commit_us] if mark else None,
                "prepared": self.prepared,
                "ends": self.ends,
                "stopped": {name: [stop.since_scn, stop.why] for name, stop in stopped},
                "tracked": self.tracked,
                "tracked_scn": self.tracked_scn,
                "told": self.told,
                "tagged": self.tagged,
                "missed": self.missed,
                "place": dataclasses.astuple(self.place) if self.place else None,
                "dropped": dict(self.dropped),
                "foreign": self.foreign,
                "unmet": self.unmet,
            }
        )


def mark_of(last: Transaction) -> LineageMark:
    """The mark of a transaction in the ring; a MySQL's GTID does not name a server_id."""
    parts = last.txid.split("-")
    is_mariadb = len(parts) == 3 and all(part.isdigit() for part in parts)
    return LineageMark(last.scn, int(parts[1]) if is_mariadb else 0, last.commit_us)


@dataclass(frozen=True, slots=True)
class Recalled:
    """What we were told before the stream: where it goes on, and what was kept of it.

    ``kept`` may be older than ``after_scn``: then the binlog is needed from there.
    """

    after_scn: int
    mark: LineageMark | None
    kept: MySqlResumeState | None

    def resume_state(self, after_scn: int) -> MySqlResumeState:
        """The memo to go on with."""
        kept = self.kept
        if kept is None:
            return MySqlResumeState(after_scn, self.mark)
        here = replace(kept, scn=after_scn, mark=self.mark)
        if kept.scn > after_scn:  # Nothing of ours lies between the two.
            return replace(here, prepared=None, ends=())
        since = [scn for scn in (kept.prepared, kept.scn + 1) if scn is not None]
        return replace(here, prepared=min(since) if since[0] <= after_scn else None)


def _place(fields: Sequence[Any] | None) -> GroupLocation | None:
    if fields is None:
        return None
    scn, server_id, file, offset = fields
    return GroupLocation(int(scn), int(server_id), str(file), int(offset))


def decode_resume_state(text: str) -> MySqlResumeState:
    """The memo in a text that ``encode`` made.

    Raises:
        FormatError: it is no memo.
    """
    try:
        document = json.loads(text)
        mark, prepared = document["mark"], document["prepared"]
        return MySqlResumeState(
            int(document["scn"]),
            LineageMark(*(int(number) for number in mark)) if mark is not None else None,
            int(prepared) if prepared is not None else None,
            tuple(int(number) for number in document.get("ends", ())),
            {
                str(name): TableSuspension(int(since_scn), str(why))
                for name, (since_scn, why) in document.get("stopped", {}).items()
            },
            str(document.get("tracked", "")),
            int(document.get("tracked_scn", 0)),
            str(document.get("told", "")),
            str(document.get("tagged", "")),
            str(document.get("missed", "")),
            _place(document.get("place")),
            {
                str(source): tuple(str(name) for name in names)
                for source, names in document.get("dropped", {}).items()
            },
            document.get("foreign"),
            tuple(str(source) for source in document.get("unmet", ())),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{text[:200]!r} is no memo of a binlog: {error}") from error
