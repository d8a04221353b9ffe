"""Tables of MariaDB with a generated column that the binlog has with another value.

MariaDB writes a row into the binlog before it assigns the row's AUTO_INCREMENT number.  A virtual
column that is computed from that number has the value for 0 there.  MySQL, and stored columns
of MariaDB, do not allow such an expression.
"""

from __future__ import annotations

from databus.relay.sources.mysql.connection import Connection

TableName = tuple[str, str]


def computed_too_early(connection: Connection, schemas: str) -> dict[TableName, str]:
    """The tables with such a column, and the reason; ``schemas`` is a list in SQL."""
    if connection.is_mysql:
        return {}
    numbers: dict[TableName, str] = {}
    computed: dict[TableName, dict[str, str]] = {}
    for schema, table, column, extra, expression in connection.query(
        "SELECT TABLE_SCHEMA, TABLE_NAME, COLUMN_NAME, EXTRA, GENERATION_EXPRESSION "
        f"FROM information_schema.COLUMNS WHERE TABLE_SCHEMA IN {schemas} "
        "AND (EXTRA LIKE '%auto_increment%' OR EXTRA LIKE '%VIRTUAL GENERATED%')"
    ):
        name = (str(schema), str(table))
        if "auto_increment" in str(extra):
            numbers[name] = str(column)
        else:
            computed.setdefault(name, {})[str(column)] = str(expression).lower()
    found = {}
    for name, number in numbers.items():
        columns = _dependent(number, computed.get(name, {}))
        if columns:
            found[name] = (
                f"its virtual column {columns[0]} is computed from the AUTO_INCREMENT column "
                f"{number}, and the binlog has it with the value from before the number was "
                f"assigned; ALTER TABLE ... DROP COLUMN {columns[0]} and compute it in queries or "
                "in a view, or leave the table out of sources"
            )
    return found


def _dependent(number: str, expressions: dict[str, str]) -> list[str]:
    """The columns that are computed from a column, directly or through others."""
    reached, waiting = [], [number]
    while waiting:
        quoted = "`" + waiting.pop().replace("`", "``").lower() + "`"
        for column, expression in expressions.items():
            if quoted in expression and column not in reached:
                reached.append(column)
                waiting.append(column)
    return reached
