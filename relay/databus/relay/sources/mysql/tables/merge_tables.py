"""MERGE tables (MRG_MyISAM): one table's rows that are other tables' rows.

The binlog names the table of the statement alone: what is written through the MERGE table is in no
event of the table that holds the rows, and the other way round.  So neither can be followed.
"""

from __future__ import annotations

from collections.abc import Mapping

from databus.common.schema.source_names import join_source
from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection
from databus.relay.sources.mysql.statements.routine_catalogue import read_dialect, union_of
from databus.relay.sources.mysql.statements.token_reader import TableName

_MERGE, _UNDERLYING = "MRG_MyISAM", "MyISAM"


def merged(connection: MySqlConnection, engines: Mapping[TableName, str]) -> dict[TableName, str]:
    """The captured tables (``engines``, by name) that a MERGE table concerns, and why."""
    if not {_MERGE, _UNDERLYING} & set(engines.values()):
        return {}
    found, dialect = {}, read_dialect(connection)
    for schema, name in connection.query(
        f"SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES WHERE ENGINE = '{_MERGE}'"
    ):
        merge = (str(schema), str(name))
        if merge in engines:
            found[merge] = (
                "it is a MERGE table, whose rows are other tables' rows: what is written to "
                "those is not in the binlog under its name; leave it out of sources"
            )
        for table in union_of(connection, merge, dialect):
            if table in engines:
                found[table] = (
                    f"it is in the union of the MERGE table {join_source(*merge)}: what is written "
                    "through that one is not in the binlog under this one's name; DROP the MERGE "
                    "table, or leave this one out of sources"
                )
    return found
