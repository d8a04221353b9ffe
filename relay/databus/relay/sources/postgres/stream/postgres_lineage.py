"""A server's history: its timeline, where earlier ones ended, and the commits in a slot's gap.

A promoted standby continues under a new timeline, from some point of the old one.  Log positions
are comparable only up to the point at which the two histories part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import asyncpg

from databus.common.errors import FormatError, SourcePositionLost, SourceUnavailable
from databus.relay.sources.announced_schemas import AnnouncedSchemas
from databus.relay.sources.postgres.protocol.lsn import flush_lsn, format_lsn, parse_lsn
from databus.relay.sources.postgres.protocol.postgres_settings import PostgresSettings
from databus.relay.sources.postgres.protocol.replication_connection import (
    PostgresError,
    ReplicationConnection,
)
from databus.relay.sources.postgres.tables.postgres_catalogue import Catalogue
from databus.relay.sources.postgres.tables.postgres_tables import quote
from databus.relay.sources.postgres.tables.publications import PublishedTables, decode_published
from databus.relay.sources.suspended_tables import TableSuspension

LARGEST_GAP_BYTES = 1 << 30
_FAILOVER_SINCE = 17_00_00

# The extension's function may be in any schema; others may have the same name.
_INSPECTOR_SQL = """
SELECT n.nspname AS schema_name FROM pg_catalog.pg_extension e
JOIN pg_catalog.pg_depend d ON d.refobjid = e.oid AND d.deptype = 'e'
     AND d.refclassid = 'pg_catalog.pg_extension'::regclass
     AND d.classid = 'pg_catalog.pg_proc'::regclass
JOIN pg_catalog.pg_proc p ON p.oid = d.objid AND p.proname = 'pg_get_wal_records_info'
JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
WHERE e.extname = 'pg_walinspect'
"""

_COMMITS_SQL = """
SELECT count(*) AS commits
FROM {schema}.pg_get_wal_records_info($1::text::pg_lsn, $2::text::pg_lsn)
WHERE resource_manager = 'Transaction' AND record_type LIKE 'COMMIT%'
"""


@dataclass(frozen=True, slots=True)
class Identity:
    """The cluster that a server belongs to, and the timeline that it writes."""

    system: str
    timeline: int


@dataclass(frozen=True, slots=True)
class PostgresResumeState:
    """Everything besides a position that is needed to resume.

    ``timeline`` is the one that the stream was read on, ``stopped`` are the tables that are passed
    over, and ``announced`` are the schemas that consumers were told of last, as
    ``AnnouncedSchemas`` encodes them.  ``published`` is what the publication was when the tables in
    ``stopped`` were found to be all that it does not give whole.
    """

    timeline: int
    suspended: Mapping[str, TableSuspension] = field(default_factory=dict)
    announced: str = ""
    published: PublishedTables = field(default_factory=PublishedTables)

    def encode(self) -> str:
        """As JSON."""
        # One that keeps its rows resumes at once, and has a record of the fetcher's by then.
        suspended = sorted(item for item in self.suspended.items() if not item[1].rows_remain)
        return json.dumps(
            {
                "timeline": self.timeline,
                "stopped": {name: [stop.since_scn, stop.why] for name, stop in suspended},
                "announced": self.announced,
                "given": self.published.to_json(),
            }
        )


def decode_resume_state(text: str) -> PostgresResumeState:
    """The resume state in a text that ``encode`` made.

    Raises:
        FormatError: the text is no such resume state.
    """
    try:
        document = json.loads(text)
        return PostgresResumeState(
            int(document["timeline"]),
            {
                str(name): TableSuspension(int(since_scn), str(why))
                for name, (since_scn, why) in document.get("stopped", {}).items()
            },
            AnnouncedSchemas(document.get("announced", "")).encode(),
            decode_published(document.get("given")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{text[:200]!r} is no resume state of a slot: {error}") from error


async def identify(settings: PostgresSettings) -> Identity:
    """The server's identity; it needs a replication session.

    Raises:
        SourceUnavailable: the server does not answer; PostgresError: it refuses the session.
    """
    connection = ReplicationConnection(settings, replication=True)
    try:
        await connection.connect()
        row = (await connection.query("IDENTIFY_SYSTEM"))[0]
        return Identity((row[0] or b"").decode(), int(row[1] or b"0"))
    finally:
        connection.close()


async def require_history(
    settings: PostgresSettings, now: Identity, timeline: int, after_scn: int
) -> None:
    """Check that this server's history has everything that was read up to ``after_scn``.

    Raises:
        SourcePositionLost: the server was promoted, or restored, without a part of it.
    """
    if now.timeline == timeline:
        return
    ended = await _ends(settings, now.timeline) if now.timeline > timeline else {}
    position = flush_lsn(after_scn)
    end = ended.get(timeline)
    if end is None or position > end:
        told = f"left it at {format_lsn(end)}" if end is not None else "has nothing to do with it"
        raise SourcePositionLost(
            f"{settings.address}: this server's history is not the one that the relay has read: it "
            f"is at {format_lsn(position)} (scn {after_scn}) of timeline {timeline}, its timeline "
            f"{now.timeline} {told}. It was promoted or restored without what came after; "
            "begin a new stream, with another options.clock_name"
        )


async def _ends(settings: PostgresSettings, timeline: int) -> dict[int, int]:
    """The LSN at which each earlier timeline ended."""
    connection = ReplicationConnection(settings, replication=True)
    try:
        await connection.connect()
        row = (await connection.query(f"TIMELINE_HISTORY {timeline}"))[0]
    except PostgresError as error:
        raise SourceUnavailable(f"{settings.address}: {error}") from error
    finally:
        connection.close()
    return parse_history((row[1] or b"").decode(errors="replace"))


def parse_history(text: str) -> dict[int, int]:
    """A timeline's history file: by timeline, the LSN at which it was left."""
    ends = {}
    for line in text.splitlines():
        fields = line.split("#")[0].split()
        if len(fields) >= 2 and fields[0].isdigit():
            ends[int(fields[0])] = parse_lsn(fields[1])
    return ends


async def commits_between(catalogue: Catalogue, start_lsn: int, stop_lsn: int) -> int | None:
    """How many transactions committed between two positions; None if that cannot be determined.

    The extension pg_walinspect (PostgreSQL 15 and later) reads the server's log.
    """
    if not 0 <= stop_lsn - start_lsn <= LARGEST_GAP_BYTES:
        return None
    try:
        found = await catalogue.fetch(_INSPECTOR_SQL)
        if not found:
            return None
        sql = _COMMITS_SQL.format(schema=quote(found[0]["schema_name"]))
        rows = await catalogue.fetch(sql, format_lsn(start_lsn), format_lsn(stop_lsn))
    except asyncpg.PostgresError:
        return None
    return int(rows[0]["commits"])


async def create_slot(settings: PostgresSettings) -> int:
    """Create our slot; returns its start, after which every commit comes whole.

    From PostgreSQL 17 on it is one that a standby with ``sync_replication_slots`` copies.
    """
    connection = ReplicationConnection(settings, replication=True)
    try:
        await connection.connect()
        ((version,),) = await connection.query("SHOW server_version_num")
        is_copied = int(version or b"0") >= _FAILOVER_SINCE
        options = "(SNAPSHOT 'nothing', FAILOVER true)" if is_copied else "NOEXPORT_SNAPSHOT"
        rows = await connection.query(
            f"CREATE_REPLICATION_SLOT {quote(settings.slot)} LOGICAL pgoutput {options}"
        )
    finally:
        connection.close()
    return parse_lsn((rows[0][1] or b"0/0").decode())
