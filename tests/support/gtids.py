"""What a MySQL session does with its GTIDs beyond counting: tags, numbers left free, purging."""

from __future__ import annotations

import uuid

from databus.relay.sources.mysql.gtid.gtid_sets import largest, parse_gtid_set
from tests.support.fixtures import FreshDatabase
from tests.support.mysql_server import MySQLServer


def make_tables(database: FreshDatabase) -> None:
    """``t`` with a parent that cascades into it, a view of it, ``spare`` with the same columns, and
    ``fence``, whose rows show how far a stream has come."""
    database.execute("CREATE TABLE parent (id INT PRIMARY KEY)")
    database.execute(
        "CREATE TABLE t (id INT PRIMARY KEY, v MEDIUMTEXT, p INT, "
        "FOREIGN KEY (p) REFERENCES parent (id) ON DELETE CASCADE)"
    )
    database.execute("CREATE TABLE spare (id INT PRIMARY KEY, v MEDIUMTEXT, p INT)")
    database.execute("CREATE TABLE fence (id INT PRIMARY KEY)")
    database.execute("CREATE VIEW through_view AS SELECT * FROM t")
    database.transaction("INSERT INTO parent VALUES (1)", "INSERT INTO t VALUES (1, 'a', 1)")


def run_under(database: FreshDatabase, gtid_next: str, *statements: str) -> None:
    """Run statements in a session that takes its GTIDs from ``gtid_next``."""
    connection = database.server.connect(database.name)
    with connection.cursor() as cursor:
        cursor.execute(f"SET gtid_next = '{gtid_next}'")
        for statement in statements:
            cursor.execute(statement)
        cursor.execute("SET gtid_next = 'AUTOMATIC'")
    connection.close()


def run_elsewhere(database: FreshDatabase, *statements: str) -> None:
    """Run statements in another domain (MariaDB), or under another server's UUID (MySQL)."""
    is_mysql = isinstance(database.server, MySQLServer)
    server = str(uuid.uuid4())
    connection = database.server.connect(database.name)
    with connection.cursor() as cursor:
        if not is_mysql:
            cursor.execute("SET gtid_domain_id = 9")
        for number, statement in enumerate(statements, 1):
            if is_mysql and not statement.startswith("SET "):
                cursor.execute(f"SET gtid_next = '{server}:{number}'")
            cursor.execute(statement)
        if is_mysql:
            cursor.execute("SET gtid_next = 'AUTOMATIC'")
    connection.close()


def run_ahead(database: FreshDatabase, count: int, statement: str) -> int:
    """Run a statement under a number that leaves ``count`` before it free; returns the first."""
    server = str(database.execute("SELECT @@server_uuid")[0][0])
    executed = parse_gtid_set(str(database.execute("SELECT @@gtid_executed")[0][0]))
    first = largest(executed[server]) + 1
    run_under(database, f"{server}:{first + count}", statement)
    return first


def purge_all_but_last(database: FreshDatabase) -> bool:
    """Purge all files but the last; False where a session still reads one of them."""
    last = database.execute("SHOW BINARY LOG STATUS")[0][0]
    database.execute(f"PURGE BINARY LOGS TO '{last}'")
    return len(database.execute("SHOW BINARY LOGS")) == 1
