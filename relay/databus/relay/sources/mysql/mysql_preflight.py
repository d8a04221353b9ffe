"""Checks of the server's settings, privileges and tables before its binlog is read.

Every finding names the setting, its value, and the statement that fixes it.
"""

from __future__ import annotations

import re
from collections.abc import Container

from databus.common.errors import UnsupportedChange
from databus.common.schema.source_names import split_source
from databus.relay.sources.contract import Finding, left_out
from databus.relay.sources.mysql.binlog.gtid_numbering import (
    DomainNumbering,
    Numbering,
    UuidNumbering,
    executed_gtids,
    own_uuid,
)
from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection, ServerError
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings
from databus.relay.sources.mysql.rows.charsets import Charsets
from databus.relay.sources.mysql.tables.mysql_tables import (
    TRANSACTIONAL_ENGINES,
    Catalogue,
    MySqlTable,
)

OLDEST_VERSION = (10, 5)
OLDEST_MYSQL = (8, 0)


def server_findings(connection: MySqlConnection, settings: MySqlSettings) -> list[Finding]:
    """The server's version, settings and our privileges on it."""
    is_mysql = connection.is_mysql
    version = _version_findings(connection.server_version, is_mysql)
    if version:
        return version
    found = _mysql_settings(connection) if is_mysql else _setting_findings(connection)
    return [*found, *_privilege_findings(connection, settings)]


def _version_findings(text: str, is_mysql: bool) -> list[Finding]:
    numbers = re.search(r"(\d+)\.(\d+)\.(\d+)" + ("" if is_mysql else "-MariaDB"), text)
    oldest = "{}.{}".format(*(OLDEST_MYSQL if is_mysql else OLDEST_VERSION))
    if numbers is None:
        return [
            Finding(
                "version",
                f"the server is {text}, neither a MariaDB nor a MySQL",
                "use a MariaDB or MySQL server",
            )
        ]
    if is_mysql:
        if (int(numbers[1]), int(numbers[2])) >= OLDEST_MYSQL:
            return []
        return [
            Finding(
                "version",
                f"MySQL {numbers[1]}.{numbers[2]} is older than what is read here",
                f"upgrade to MySQL {oldest} or later",
            )
        ]
    if (int(numbers[1]), int(numbers[2])) < OLDEST_VERSION:
        return [
            Finding(
                "version",
                f"MariaDB {numbers[1]}.{numbers[2]} is older than what is read here",
                f"upgrade to MariaDB {oldest} or later",
            )
        ]
    return []


_WANTED: tuple[tuple[str, str, str], ...] = (
    ("binlog_format", "ROW", "statements cannot be turned into rows"),
    ("binlog_row_image", "FULL", "rows would come without some of their columns"),
)


def _setting_findings(connection: MySqlConnection) -> list[Finding]:
    found = _variables(
        connection, "log_bin", "gtid_strict_mode", "binlog_row_metadata", *_names(_WANTED)
    )
    if found.get("log_bin") != "ON":
        return [_no_binlog("[mariadbd]")]
    findings = [*_not_as_wanted(found, _WANTED, "[mariadbd]"), *_nameless(found, "[mariadbd]")]
    if found.get("gtid_strict_mode") != "ON":
        findings.append(
            Finding(
                "gtid_strict_mode",
                "it is OFF: the relay refuses GTIDs out of order instead of the server",
                "SET GLOBAL gtid_strict_mode = ON",
                fatal=False,
            )
        )
    return findings


_GTIDS_ON = (
    "SET GLOBAL enforce_gtid_consistency = ON; SET GLOBAL gtid_mode = OFF_PERMISSIVE; "
    "SET GLOBAL gtid_mode = ON_PERMISSIVE; SET GLOBAL gtid_mode = ON; and gtid_mode=ON and "
    "enforce_gtid_consistency=ON under [mysqld] in its configuration"
)


def _mysql_settings(connection: MySqlConnection) -> list[Finding]:
    found = _variables(connection, "log_bin", "gtid_mode", "binlog_row_metadata", *_names(_WANTED))
    if found.get("log_bin") != "ON":
        return [_no_binlog("[mysqld]")]
    findings = [
        *_not_as_wanted(found, _WANTED, "[mysqld]"),
        *_nameless(found, "[mysqld]"),
    ]
    if found.get("gtid_mode") != "ON":
        findings.append(
            Finding(
                "gtid_mode",
                f"it is {found.get('gtid_mode', 'unknown')}, not ON: transactions would have no "
                "scn",
                _GTIDS_ON,
            )
        )
    return findings


def _variables(connection: MySqlConnection, *names: str) -> dict[str, str]:
    listed = ", ".join(f"'{name}'" for name in names)
    return {
        str(name).lower(): str(value).upper()
        for name, value in connection.query(
            f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({listed})"
        )
    }


def _no_binlog(section: str) -> Finding:
    return Finding(
        "log_bin",
        "the server writes no binlog",
        f"put log_bin=binlog and server_id=1 under {section} in the server's configuration and "
        "restart it",
    )


def _not_as_wanted(
    found: dict[str, str], all_wanted: tuple[tuple[str, str, str], ...], section: str
) -> list[Finding]:
    return [
        Finding(
            name,
            f"it is {found.get(name, 'unknown')}, not {wanted or 'empty'}: {why}",
            f"SET GLOBAL {name} = {wanted or repr(wanted)}; and the same under {section} in its "
            "configuration; sessions that are open keep the old value until they reconnect",
        )
        for name, wanted, why in all_wanted
        if found.get(name) != wanted
    ]


def _nameless(found: dict[str, str], section: str) -> list[Finding]:
    """Without names in the binlog the relay infers column names; that is not always certain."""
    value = found.get("binlog_row_metadata", "unknown")
    if value == "FULL":
        return []
    return [
        Finding(
            "binlog_row_metadata",
            f"it is {value}, not FULL: the binlog does not name the columns, so they are inferred; "
            "if a table is altered twice before the relay reads the rows in between, the table "
            "is suspended",
            f"SET GLOBAL binlog_row_metadata = FULL; and the same under {section} in its "
            "configuration",
            fatal=False,
        )
    ]


def _names(all_wanted: tuple[tuple[str, str, str], ...]) -> list[str]:
    return [name for name, _, _ in all_wanted]


_ALL = "ALL PRIVILEGES"


def _privilege_findings(connection: MySqlConnection, settings: MySqlSettings) -> list[Finding]:
    grants = [str(row[0]) for row in connection.query("SHOW GRANTS")]
    everywhere: set[str] = set()
    for grant in grants:
        found = re.match(r"GRANT (.*?) ON \*\.\* TO", grant)
        if found:
            everywhere |= {name.strip() for name in found[1].split(",")}
    account = connection.row("SELECT CURRENT_USER()")[0]
    user, _, host = str(account).rpartition("@")
    who = f"'{user}'@'{host}'"
    findings = []
    if not everywhere & {_ALL, "REPLICATION SLAVE"}:
        findings.append(
            Finding(
                "REPLICATION SLAVE",
                f"{who} may not read the binlog",
                f"GRANT REPLICATION SLAVE ON *.* TO {who}",
            )
        )
    monitor = "REPLICATION CLIENT" if connection.is_mysql else "BINLOG MONITOR"
    if not everywhere & {_ALL, "BINLOG MONITOR", "REPLICATION CLIENT", "SUPER"}:
        findings.append(
            Finding(
                monitor,
                f"{who} may not read binlog positions",
                f"GRANT {monitor} ON *.* TO {who}",
            )
        )
    return findings + _select_findings(grants, everywhere, settings, who)


def _select_findings(
    grants: list[str], everywhere: set[str], settings: MySqlSettings, who: str
) -> list[Finding]:
    """SELECT on the schemas in the patterns; a grant on any table of a schema counts."""
    if everywhere & {_ALL, "SELECT"}:
        return []
    findings = []
    for schema in sorted({split_source(pattern)[0] for pattern in settings.sources}):
        granted = any(
            re.match(rf"GRANT (ALL PRIVILEGES|.*\bSELECT\b.*) ON `{re.escape(schema)}`\.", grant)
            for grant in (one.replace("\\_", "_") for one in grants)
        )
        if not granted:
            findings.append(
                Finding(
                    "SELECT",
                    f"{who} may not read the tables of {schema}",
                    f"GRANT SELECT ON {'*' if '*' in schema else schema}.* TO {who}",
                )
            )
    return findings


def table_findings(
    catalogue: Catalogue, charsets: Charsets, settings: MySqlSettings
) -> list[Finding]:
    """Tables without a key, and types or character sets that cannot be converted."""
    return [
        finding for table in catalogue.values() for finding in _one_table(table, charsets, settings)
    ]


def left_out_tables(
    catalogue: Catalogue, charsets: Charsets, settings: MySqlSettings, suspended: Container[str]
) -> list[str]:
    """Warnings of tables that cannot be captured, and of which no row has come to suspend them."""
    return [
        left_out(finding)
        for finding in table_findings(catalogue, charsets, settings)
        if finding.fatal and finding.table not in suspended
    ]


def _one_table(table: MySqlTable, charsets: Charsets, settings: MySqlSettings) -> list[Finding]:
    findings = []
    exclude = "or name the other tables alone in the database's sources"
    if not table.key:
        names = [column.name for column in table.columns]
        statement = f"ALTER TABLE {table.source} ADD PRIMARY KEY (...)"
        findings.append(settings.keys.finding(table.source, names, statement))
    if table.unlogged:
        what = f"changes of {table.source} that are not in the binlog"
        advice = "ALTER or DROP what the finding names, or put the table into exclude_sources"
        findings.append(Finding(what, table.unlogged, advice, table=table.source))
    try:
        table.columns_as_seen(settings.zero_dates)
    except UnsupportedChange as error:
        findings.append(
            Finding(
                f"types of {table.source}",
                error.message,
                f"change the type, {exclude}",
                table=table.source,
            )
        )
    for column in table.columns:
        charset = charsets.named(column.charset) if column.charset else None
        if charset is not None and not charset.known:
            findings.append(
                Finding(
                    f"character set of {table.source}.{column.name}",
                    f"{column.charset} cannot be decoded",
                    f"ALTER TABLE {table.source} CONVERT TO CHARACTER SET utf8mb4, {exclude}",
                    table=table.source,
                )
            )
    if table.engine not in TRANSACTIONAL_ENGINES:
        findings.append(
            Finding(
                f"engine of {table.source}",
                f"{table.engine} has no snapshots: the table streams, but cannot be dumped",
                f"ALTER TABLE {table.source} ENGINE = InnoDB",
                fatal=False,
            )
        )
    return findings


def choose_numbering(
    connection: MySqlConnection, settings: MySqlSettings
) -> tuple[Numbering, list[Finding]]:
    """The numbering of this server's transactions, and findings about the options for it."""
    if connection.is_mysql:
        own = own_uuid(connection)
        uuids = settings.uuids or (own,)
        return UuidNumbering(uuids), _uuid_findings(connection, uuids, own)
    domain_id = settings.domain_id
    configured = domain_id is not None
    if domain_id is None:
        domain_id = int(connection.row("SELECT @@global.gtid_domain_id")[0])
    findings = _domain_findings(connection, domain_id, configured)
    return DomainNumbering(domain_id), findings


def _uuid_findings(connection: MySqlConnection, uuids: tuple[str, ...], own: str) -> list[Finding]:
    """Servers that have written, or may write, but whose transactions are skipped."""
    written = {name.partition(":")[0] for name in executed_gtids(connection)}
    missing = sorted((written | {own}) - set(uuids))
    if not missing:
        return []
    return [
        Finding(
            "uuids",
            f"transactions of the servers {', '.join(missing)} are skipped",
            'if they wrote to captured tables, list all in their order of writing: uuids = "a,b"',
            fatal=False,
        )
    ]


def _domain_findings(
    connection: MySqlConnection, domain_id: int, configured: bool
) -> list[Finding]:
    """Whether the server has the chosen domain."""
    try:
        state = str(connection.row("SELECT @@gtid_binlog_state")[0] or "")
    except ServerError as error:
        return [Finding("gtid_binlog_state", str(error), "grant BINLOG MONITOR")]
    domains = {int(gtid.split("-")[0]) for gtid in state.split(",") if gtid}
    if not domains or domain_id in domains or not configured:
        return []
    return [
        Finding(
            "domain_id",
            f"domain {domain_id} is configured, but the binlog has only {sorted(domains)}",
            "set the database's option domain_id to one of these",
        )
    ]
