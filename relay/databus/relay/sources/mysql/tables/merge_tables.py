"""MERGE tables (MRG_MyISAM): one table's rows that are other tables' rows.

The binlog names the table of the statement alone: what is written through the MERGE table is in no
event of the table that holds the rows, and the other way round.  So neither can be followed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from databus.common.schema.source_names import join_source
from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection

_MERGE, _UNDERLYING = "MRG_MyISAM", "MyISAM"
TableName = tuple[str, str]


def merged(connection: MySqlConnection, engines: Mapping[TableName, str]) -> dict[TableName, str]:
    """The captured tables (``engines``, by name) that a MERGE table concerns, and why."""
    if not {_MERGE, _UNDERLYING} & set(engines.values()):
        return {}
    found = {}
    for schema, name in connection.query(
        f"SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES WHERE ENGINE = '{_MERGE}'"
    ):
        merge = (str(schema), str(name))
        if merge in engines:
            found[merge] = (
                "it is a MERGE table, whose rows are other tables' rows: what is written to "
                "those is not in the binlog under its name; leave it out of sources"
            )
        for table in _union(connection, merge):
            if table in engines:
                found[table] = (
                    f"it is in the union of the MERGE table {join_source(*merge)}: what is written "
                    "through that one is not in the binlog under this one's name; DROP the MERGE "
                    "table, or leave this one out of sources"
                )
    return found


def _union(connection: MySqlConnection, merge: TableName) -> list[TableName]:
    quoted = ".".join("`" + part.replace("`", "``") + "`" for part in merge)
    statement = str(connection.row(f"SHOW CREATE TABLE {quoted}")[1])
    listed = re.search(r"UNION=\((.*)\)", statement)
    if listed is None:
        return []
    part = r"`((?:[^`]|``)*)`"
    return [
        ((schema or merge[0]).replace("``", "`"), name.replace("``", "`"))
        for schema, name in re.findall(rf"(?:{part}\.)?{part}", listed[1])
    ]
