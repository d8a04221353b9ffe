"""Checks of the server before capture; each finding has the statement that fixes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncpg

from databus.relay.sources.contract import Finding
from databus.relay.sources.postgres.protocol.postgres_settings import PostgresSettings
from databus.relay.sources.postgres.protocol.replication_connection import PostgresError
from databus.relay.sources.postgres.stream.postgres_lineage import identify
from databus.relay.sources.postgres.tables.postgres_catalogue import (
    SIGN_IN_STATES,
    Catalogue,
    create_publication_sql,
)
from databus.relay.sources.postgres.tables.postgres_tables import (
    PostgresTable,
    key_remedy,
    matches,
    quote,
)

STANDBY = "pg_is_in_recovery"
_OLDEST_VERSION = 130000


async def examine(
    settings: PostgresSettings, globs: Sequence[str], catalogue: Catalogue
) -> list[Finding]:
    """All obstacles to capture.

    Raises:
        SourceUnavailable: the server does not answer.
    """
    try:
        facts = await catalogue.facts()
    except asyncpg.PostgresError as error:
        return [_sign_in(settings, str(error))]
    findings = _server(settings, facts)
    findings += await _slot(settings, catalogue, facts)
    findings += await _replication(settings, facts)
    tables = [t for t in (await catalogue.tables()).values() if matches(t.source, globs)]
    findings += _tables(settings, globs, tables)
    findings += await _publication(settings, catalogue, facts, [t for t in tables if t.key])
    return findings


def _sign_in(settings: PostgresSettings, refusal: str) -> Finding:
    return Finding(
        "sign-in",
        f"the server refuses {settings.address}: {refusal}",
        "correct user, password and database in the url, and the server's pg_hba.conf",
    )


def _server(settings: PostgresSettings, facts: dict[str, Any]) -> list[Finding]:
    found = []
    if facts["version_number"] < _OLDEST_VERSION:
        found.append(
            Finding(
                "server_version",
                f"it is {facts['version']}; 13 is the oldest that is supported",
                "upgrade the server",
            )
        )
    if facts["wal_level"] != "logical":
        found.append(
            Finding(
                "wal_level",
                f"it is {facts['wal_level']}; the log holds no row changes",
                "ALTER SYSTEM SET wal_level = 'logical'; then restart the server",
            )
        )
    if facts["encoding"] == "SQL_ASCII":
        found.append(
            Finding(
                "server_encoding",
                "it is SQL_ASCII: the database has no encoding for its texts, and a table with "
                f"one that is not in {settings.sql_ascii_encoding} is suspended",
                "set options.sql_ascii_encoding to what they are in, or restore the database into "
                "one with ENCODING 'UTF8'",
                fatal=False,
            )
        )
    if facts["in_recovery"]:
        found.append(
            Finding(
                STANDBY,
                "the server is a standby; slots are on the primary",
                "put the primary's address into the url, or all of them: host:port,host:port",
            )
        )
    if not (facts["may_replicate"] or facts["is_superuser"]):
        found.append(
            Finding(
                "role",
                f"{facts['user']} has no REPLICATION attribute",
                f"ALTER ROLE {quote(facts['user'])} REPLICATION",
            )
        )
    if facts["senders"] >= facts["max_senders"]:
        found.append(
            Finding(
                "max_wal_senders",
                f"all {facts['max_senders']} are in use",
                f"ALTER SYSTEM SET max_wal_senders = {facts['max_senders'] + 5}; "
                "then restart the server",
            )
        )
    return found


async def _slot(
    settings: PostgresSettings, catalogue: Catalogue, facts: dict[str, Any]
) -> list[Finding]:
    slot = await catalogue.slot()
    if slot is None:
        if facts["slots"] < facts["max_slots"]:
            return []
        return [
            Finding(
                "max_replication_slots",
                f"all {facts['max_slots']} are in use",
                f"ALTER SYSTEM SET max_replication_slots = {facts['max_slots'] + 5}; "
                "then restart the server",
            )
        ]
    if slot.slot_type != "logical" or slot.plugin != "pgoutput":
        problem = f"{settings.slot} is a {slot.slot_type} slot of plugin {slot.plugin}"
    elif slot.database != settings.database:
        problem = f"{settings.slot} belongs to the database {slot.database}"
    else:
        return []
    return [Finding("slot", problem, "set options.slot to a name that is free")]


async def _replication(settings: PostgresSettings, facts: dict[str, Any]) -> list[Finding]:
    """Whether pg_hba.conf and the role allow a replication session."""
    if not (facts["may_replicate"] or facts["is_superuser"]):
        return []
    if facts["senders"] >= facts["max_senders"]:
        return []
    try:
        await identify(settings)
    except PostgresError as error:
        if error.sqlstate in SIGN_IN_STATES:
            return [_sign_in(settings, error.message)]
        raise
    return []


def _tables(
    settings: PostgresSettings, globs: Sequence[str], tables: list[PostgresTable]
) -> list[Finding]:
    found = []
    if not tables:
        found.append(
            Finding(
                "sources",
                f"no table of {settings.database} matches {', '.join(globs)}",
                "correct sources, or create the tables; they join when they appear",
                fatal=False,
            )
        )
    for table in tables:
        if table.key_is_deferrable or table.unfit_partition:
            problem = (
                f"its partition {table.unfit_partition} could not be followed, or the server "
                "would refuse the application's updates and deletes there"
                if table.unfit_partition
                else "its key is DEFERRABLE: the server would refuse the application's updates and "
                "deletes of a published table"
            )
            setting = f"key of {table.source}"
            found.append(Finding(setting, problem, key_remedy(table), table=table.source))
        elif not table.key and not table.primary_key and not table.configured_key:
            names = [column.name for column in table.columns]
            found.append(settings.keys.finding(table.source, names, key_remedy(table)))
        elif not table.key:
            found.append(
                Finding(
                    f"key of {table.source}",
                    f"its replica identity ({table.identity}) does not hold its key",
                    key_remedy(table),
                    table=table.source,
                )
            )
        if not table.may_select:
            found.append(
                Finding(
                    f"privilege on {table.source}",
                    f"{settings.user} may not read it",
                    f"GRANT SELECT ON {table.quoted} TO {quote(settings.user)}",
                    table=table.source,
                )
            )
        if table.is_row_secured:
            found.append(
                Finding(
                    f"row security of {table.source}",
                    f"its policies apply to {settings.user}, so that dumps would lack rows",
                    f"ALTER ROLE {quote(settings.user)} BYPASSRLS",
                    table=table.source,
                )
            )
    return found


async def _publication(
    settings: PostgresSettings,
    catalogue: Catalogue,
    facts: dict[str, Any],
    tables: list[PostgresTable],
) -> list[Finding]:
    """Check the publication: ``open`` creates it and adds tables to it, if the user may.

    The relay does not undo an operator's changes of the publication.  A table that it does not
    publish completely is not captured.
    """
    publication = await catalogue.publication()
    name = settings.publication
    theirs = [t for t in tables if not (t.is_owner or facts["is_superuser"])]
    if publication is None:
        if theirs or not facts["may_create"]:
            return [
                Finding(
                    "publication",
                    f"{name} does not exist and {settings.user} may not create it",
                    create_publication_sql(name, tables),
                )
            ]
        return []
    is_in_use = await catalogue.slot() is not None
    found = []
    for table in tables:
        problem = publication.problem(table)
        if problem is None:
            continue
        what, fatal = f"{table.source} is not published completely: {problem.what}", True
        if problem.is_absent and publication.is_owner and table not in theirs:
            if not is_in_use:
                continue  # It will be added.
            what = f"{problem.what}: it is added now if it is new, and not if it was removed"
            what, fatal = what.replace("it:", f"{table.source}:"), False
        elif problem.is_absent:
            what = f"{name} lacks {table.source} and {settings.user} may not add it"
        found.append(Finding("publication", what, problem.cure, fatal=fatal, table=table.source))
    return found
