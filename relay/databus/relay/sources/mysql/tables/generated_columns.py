"""MariaDB tables with a generated column whose value in the binlog is wrong.

MariaDB writes a row into the binlog before it assigns the row's AUTO_INCREMENT number.  A virtual
column that is computed from that number has the value for 0 there.  MySQL, and stored columns
of MariaDB, do not allow such an expression.
"""

from __future__ import annotations

TableName = tuple[str, str]


class GeneratedColumns:
    """The AUTO_INCREMENT columns of tables, and the expressions of their virtual columns.

    Owner: one reading of the catalogue.
    """

    def __init__(self) -> None:
        self._numbers: dict[TableName, str] = {}
        self._expressions: dict[TableName, dict[str, str]] = {}

    def add(self, table: TableName, column: str, extra: str, expression: str) -> None:
        """Add a row of information_schema.COLUMNS."""
        if "auto_increment" in extra:
            self._numbers[table] = column
        elif "VIRTUAL GENERATED" in extra:
            self._expressions.setdefault(table, {})[column] = expression.lower()

    def computed_too_early(self) -> dict[TableName, str]:
        """The tables with a virtual column that is computed from the number, and the reason."""
        found = {}
        for table, number in self._numbers.items():
            columns = _dependent(number, self._expressions.get(table, {}))
            if columns:
                found[table] = (
                    f"its virtual column {columns[0]} is computed from the AUTO_INCREMENT column "
                    f"{number}, and the binlog has it with the value from before the number was "
                    f"assigned; ALTER TABLE ... DROP COLUMN {columns[0]} and compute it in "
                    "queries or in a view, or leave the table out of sources"
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
