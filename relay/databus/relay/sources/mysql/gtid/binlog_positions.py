"""The location of a GTID sequence number in the binlog files.

MariaDB can find a GTID position, but it needs one for every domain, and skips events if a server
id is wrong.  So the resume state stores the location of the last transaction.  If the server has
another transaction there (it is another server, or the file was purged), the relay looks up the
file, reads it from its beginning, and skips transactions at or before the scn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from databus.common.errors import SourcePositionLost, SourceUnavailable
from databus.relay.sources.mysql.gtid.foreign_gtids import ForeignGtids
from databus.relay.sources.mysql.gtid.mysql_lineage import GroupLocation, MySqlResumeState
from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection, ServerError
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings

FIRST_OFFSET = 4
_GTID = re.compile(r"\bGTID (\d+)-(\d+)-(\d+)")


def domain_seq_no(state: object, domain_id: int) -> int:
    """The sequence number of a domain in a GTID state such as ``0-1-812,9-3-7``; 0 if none."""
    for gtid in str(state or "").split(","):
        parts = gtid.split("-")
        if len(parts) == 3 and int(parts[0]) == domain_id:
            return int(parts[2])
    return 0


def head_scn(connection: MySqlConnection, domain_id: int) -> int:
    """The last sequence number of the domain in the binlog."""
    return domain_seq_no(connection.row("SELECT @@global.gtid_binlog_pos")[0], domain_id)


def _state_at(connection: MySqlConnection, file: str, offset: int) -> str:
    """The GTID state before a location in the binlog.

    Raises:
        SourceUnavailable: the server returns none: it has purged the file meanwhile, or cannot read
            it now.
    """
    (state,) = connection.row("SELECT BINLOG_GTID_POS(%s, CAST(%s AS UNSIGNED))", (file, offset))
    if state is None:
        raise SourceUnavailable(
            f"the server returns no GTID position for its binlog location {file}:{offset}"
        )
    return str(state)


def scn_at(connection: MySqlConnection, file: str, offset: int, domain_id: int) -> int:
    """The domain's last sequence number before a location in the binlog."""
    return domain_seq_no(_state_at(connection, file, offset), domain_id)


def scn_of_snapshot(connection: MySqlConnection, file: str, offset: int, domain_id: int) -> int:
    """The domain's last sequence number at the binlog location of a snapshot.

    ``BINLOG_GTID_POS`` reads the file from its beginning.  Without concurrent writes it is not
    needed: if the binlog's end is this location before and after the GTID position is read, the
    two belong together.  The server writes a group while it blocks these queries.
    """
    location = (file, str(offset))
    if tuple(map(str, connection.row("SHOW MASTER STATUS")[:2])) == location:
        scn = head_scn(connection, domain_id)
        if tuple(map(str, connection.row("SHOW MASTER STATUS")[:2])) == location:
            return scn
    return scn_at(connection, file, offset, domain_id)


@dataclass(frozen=True, slots=True)
class Beginning:
    """The location from which the binlog is read, and the scn before its first event."""

    file: str
    offset: int
    after_scn: int


def beginning_for(
    connection: MySqlConnection,
    settings: MySqlSettings,
    domain_id: int,
    resume_state: MySqlResumeState,
) -> Beginning:
    """The last known location at or before the events that ``resume_state`` needs.

    That is the resume state's own, or else the beginning of a file before which nothing is unread.
    If that file was purged it is the first one, if it begins at or before that position.

    Raises:
        SourcePositionLost: every file begins later, or the server has not come that far.
    """
    scn = resume_state.scn
    head = head_scn(connection, domain_id)
    where = f"{settings.host}:{settings.port} (database={settings.name}, domain={domain_id})"
    if head < scn:
        raise SourcePositionLost(
            f"the relay is at GTID sequence {scn}, but {where} has only reached {head}; it was "
            "reset, restored from a backup, or is a replica that lags behind"
        )
    location = resume_state.location
    if (
        location is not None
        and location.scn - 1 <= resume_state.read_from
        and _has(connection, domain_id, location)
    ):
        return Beginning(location.file, location.offset, location.scn - 1)
    files = [str(row[0]) for row in connection.query("SHOW BINARY LOGS")]
    low, high = 0, len(files) - 1
    first = scn_at(connection, files[0], FIRST_OFFSET, domain_id)
    if first > scn:
        raise SourcePositionLost(
            f"the relay is at GTID sequence {scn}, but the binlog of {where} begins after {first} "
            f"({files[0]}); the files before it were purged. It reaches to {head}"
        )
    found = first
    while low < high:
        middle = (low + high + 1) // 2
        begins = scn_at(connection, files[middle], FIRST_OFFSET, domain_id)
        if begins <= resume_state.read_from:
            low, found = middle, begins
        else:
            high = middle - 1
    # Another server can have groups of other domains farther back than the one we have read.
    read = ForeignGtids(resume_state.foreign or "")
    while low and read.lacks(_state_at(connection, files[low], FIRST_OFFSET), domain_id):
        low -= 1
        found = scn_at(connection, files[low], FIRST_OFFSET, domain_id)
    return Beginning(files[low], FIRST_OFFSET, found)


def _has(connection: MySqlConnection, domain_id: int, location: GroupLocation) -> bool:
    """Whether the server's binlog has that transaction at that location."""
    try:
        shown = connection.query(
            "SHOW BINLOG EVENTS IN %s FROM %s LIMIT 1", (location.file, location.offset)
        )
    except ServerError:
        return False  # The file or the offset does not exist there.
    found = [match for row in shown for match in _GTID.findall(str(row[5]))]
    return found == [(str(domain_id), str(location.server_id), str(location.scn))]
