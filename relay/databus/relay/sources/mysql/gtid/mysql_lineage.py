"""The history of transactions that the stream has read: what the resume state stores of it.

A position is a number, and numbers restart after RESET MASTER, on another server, or on a
replica that was promoted without the last transactions of its primary.  So the resume state
identifies the last transaction itself, which is the same on every server that has it.
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
    """A transaction that was read: its server and time, which are the same on a replica.

    ``server_id`` is 0 if only the time is known.
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


def require_same(found: LineageMark, expected: LineageMark, where: str) -> None:
    """Check that the transaction at ``where`` is the expected one.

    Raises:
        SourcePositionLost: it is another one.
    """
    if not found.is_same(expected):
        raise SourcePositionLost(
            f"{where}: this server's history is not the one that the relay has read: expected "
            f"{expected}, found {found}. It was reset, is another server, or was promoted "
            "without the last transactions of its primary"
        )


@dataclass(frozen=True, slots=True)
class GroupLocation:
    """The location of a transaction's group in one server's binlog (MariaDB)."""

    scn: int
    server_id: int
    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class MySqlResumeState:
    """Everything besides the number that is needed to resume after ``scn``.

    ``prepared``: the scn of the oldest XA transaction that is prepared and not completed.
    ``ends`` (MySQL): the last number read of each generation; they reveal a server that writes
    again after another one was promoted.  ``suspended``: the suspended tables.  ``inferred``:
    the definitions, certain at ``inferred_scn``, of tables whose columns the binlog does not name
    (``inferred_columns.py``).  ``announced``: the definitions announced last
    (``sources/announced_schemas.py``).  ``tagged`` and ``missed`` (MySQL, in the server's form):
    the tagged GTIDs from before the first start, and the numbers that had not come when larger
    ones had (``out_of_order_gtids.py``).  ``location``: where the transaction ``mark`` begins on
    the server of the stream.  ``dropped``: columns that statements dropped since the last certain
    definition of their table (``dropped_columns.py``).  ``foreign``: the GTIDs of other domains or
    servers that need not be read again, in the server's form; None if an earlier version stored
    the state.  ``invisible``: captured names that the account could not see (``known_tables.py``).
    ``cascades``: the foreign keys with actions (``cascades.py``).
    """

    scn: int
    mark: LineageMark | None = None
    prepared: int | None = None
    ends: tuple[int, ...] = ()
    suspended: Mapping[str, TableSuspension] = field(default_factory=dict)
    inferred: str = ""
    inferred_scn: int = 0
    announced: str = ""
    tagged: str = ""
    missed: str = ""
    location: GroupLocation | None = None
    dropped: Mapping[str, Sequence[str]] = field(default_factory=dict)
    foreign: str | None = None
    invisible: tuple[str, ...] = ()
    cascades: str = ""

    @property
    def read_from(self) -> int:
        """The scn after which the binlog is needed."""
        scns = [self.scn]
        if self.mark is not None:
            scns.append(self.mark.scn - 1)
        if self.prepared is not None:
            scns.append(self.prepared - 1)
        return max(0, min(scns))

    def encode(self) -> str:
        """As JSON."""
        mark, suspended = self.mark, sorted(self.suspended.items())
        return json.dumps(
            {
                "scn": self.scn,
                "mark": [mark.scn, mark.server_id, mark.commit_us] if mark else None,
                "prepared": self.prepared,
                "ends": self.ends,
                "stopped": {name: [one.since_scn, one.why] for name, one in suspended},
                "tracked": self.inferred,
                "tracked_scn": self.inferred_scn,
                "told": self.announced,
                "tagged": self.tagged,
                "missed": self.missed,
                "place": dataclasses.astuple(self.location) if self.location else None,
                "dropped": dict(self.dropped),
                "foreign": self.foreign,
                "unmet": self.invisible,
                "cascades": self.cascades,
            }
        )


def mark_of(last: Transaction) -> LineageMark:
    """The mark of a transaction in the ring; a MySQL GTID does not contain a server_id."""
    parts = last.txid.split("-")
    is_mariadb = len(parts) == 3 and all(part.isdigit() for part in parts)
    return LineageMark(last.scn, int(parts[1]) if is_mariadb else 0, last.commit_us)


@dataclass(frozen=True, slots=True)
class RestoredState:
    """The arguments of ``restore``: the resume position and the stored resume state.

    ``stored`` may be older than ``after_scn``: then the binlog is needed from there.
    """

    after_scn: int
    mark: LineageMark | None
    stored: MySqlResumeState | None

    def resume_state(self, after_scn: int) -> MySqlResumeState:
        """The resume state to continue with."""
        stored = self.stored
        if stored is None:
            return MySqlResumeState(after_scn, self.mark)
        here = replace(stored, scn=after_scn, mark=self.mark)
        if stored.scn > after_scn:  # Nothing of ours lies between the two.
            return replace(here, prepared=None, ends=())
        since = [scn for scn in (stored.prepared, stored.scn + 1) if scn is not None]
        return replace(here, prepared=min(since) if since[0] <= after_scn else None)


def _location(fields: Sequence[Any] | None) -> GroupLocation | None:
    if fields is None:
        return None
    scn, server_id, file, offset = fields
    return GroupLocation(int(scn), int(server_id), str(file), int(offset))


def decode_resume_state(text: str) -> MySqlResumeState:
    """The resume state in a text that ``encode`` made.

    Raises:
        FormatError: the text is no such resume state.
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
            _location(document.get("place")),
            {
                str(source): tuple(str(name) for name in names)
                for source, names in document.get("dropped", {}).items()
            },
            document.get("foreign"),
            tuple(str(source) for source in document.get("unmet", ())),
            str(document.get("cascades", "")),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{text[:200]!r} is no resume state of a binlog: {error}") from error
