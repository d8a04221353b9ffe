"""A server's history: its timelines, the resume state, and the commits in a gap of the slot.

A promoted standby starts a new timeline at some LSN of the old one.  The LSNs of two timelines
are comparable only up to that LSN.
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

# The extension can be in any schema, and another function can have the same name.
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
    """A server's system identifier and its current timeline."""

    system: str
    timeline: int


@dataclass(frozen=True, slots=True)
class PostgresResumeState:
    """Everything besides a position that is needed to resume.

    ``timeline`` is the timeline of the stream.  ``suspended`` are the suspended tables.
    ``announced`` are the schemas that were published last, as ``AnnouncedSchemas`` encodes them.
    ``published`` is the publication; ``suspended`` has every table that it does not publish
    completely.
    """

    timeline: int
    suspended: Mapping[str, TableSuspension] = field(default_factory=dict)
    announced: str = ""
    published: PublishedTables = field(default_factory=PublishedTables)

    def encode(self) -> str:
        """As JSON."""
        # A table with ``rows_remain`` resumes after its transaction; the fetcher has its record.
        suspended = sorted(item for item in self.suspended.items() if not item[1].rows_remain)
        return json.dumps(
            {
                "timeline": self.timeline,
                "stopped": {name: [one.since_scn, one.why] for name, one in suspended},
                "announced": self.announced,
                "given": self.published.to_json(),
                "renewal": self.published.renewal.to_json(),
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
            decode_published(document.get("given"), document.get("renewal")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{text[:200]!r} is no resume state of a slot: {error}") from error


async def identify(settings: PostgresSettings) -> Identity:
    """The server's identity, by a replication connection.

    Raises:
        SourceUnavailable: the server does not answer.
        PostgresError: it refuses the connection.
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
    """Check that this server's history includes everything that was read up to ``after_scn``.

    Raises:
        SourcePositionLost: the server was promoted or restored without a part of it.
    """
    if now.timeline == timeline:
        return
    ends = await _timeline_ends(settings, now.timeline) if now.timeline > timeline else {}
    position = flush_lsn(after_scn)
    end = ends.get(timeline)
    if end is None or position > end:
        branch = f"branched off at {format_lsn(end)}" if end is not None else "is unrelated to it"
        raise SourcePositionLost(
            f"{settings.address}: this server's history is not the one that the relay has read: "
            f"the relay is at {format_lsn(position)} (scn {after_scn}) of timeline {timeline}, and "
            f"the server's timeline {now.timeline} {branch}. The server was promoted or restored "
            "without the later changes; begin a new stream, with another options.clock_name"
        )


async def _timeline_ends(settings: PostgresSettings, timeline: int) -> dict[int, int]:
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
    """The LSN at which each earlier timeline ended, from the history file of a timeline."""
    ends = {}
    for line in text.splitlines():
        fields = line.split("#")[0].split()
        if len(fields) >= 2 and fields[0].isdigit():
            ends[int(fields[0])] = parse_lsn(fields[1])
    return ends


async def commits_between(catalogue: Catalogue, start_lsn: int, stop_lsn: int) -> int | None:
    """The number of transactions that committed between two LSNs; None if it is unknown.

    Reads the WAL with the extension pg_walinspect (PostgreSQL 15 and later).
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
    """Create the replication slot; returns its consistent point.

    The stream has every transaction that commits after that LSN.  From PostgreSQL 17 on, a standby
    with ``sync_replication_slots`` copies the slot.
    """
    connection = ReplicationConnection(settings, replication=True)
    try:
        await connection.connect()
        ((version,),) = await connection.query("SHOW server_version_num")
        has_failover = int(version or b"0") >= _FAILOVER_SINCE
        options = "(SNAPSHOT 'nothing', FAILOVER true)" if has_failover else "NOEXPORT_SNAPSHOT"
        rows = await connection.query(
            f"CREATE_REPLICATION_SLOT {quote(settings.slot)} LOGICAL pgoutput {options}"
        )
    finally:
        connection.close()
    return parse_lsn((rows[0][1] or b"0/0").decode())
