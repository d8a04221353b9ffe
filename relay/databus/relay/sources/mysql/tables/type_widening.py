"""Which changes of a column's type leave every value as it was."""

from __future__ import annotations

import re

from databus.common.schema.source_schema import SourceSchema

_WIDTHS = (
    ("tinyint", "smallint", "mediumint", "int", "bigint"),
    ("tinytext", "text", "mediumtext", "longtext"),
    ("tinyblob", "blob", "mediumblob", "longblob"),
)
_SIZED = re.compile(r"(varchar|varbinary|datetime|timestamp|time)(?:\((\d+)\))?")
_LISTED = ("enum(", "set(")


def retains_values(old: SourceSchema | None, new: SourceSchema | None) -> bool:
    """Whether each column that both have holds the same values behind an ALTER TABLE.

    False also where one of the two is not known.
    """
    if old is None or new is None:
        return False
    types = {column.name: column for column in old.columns}
    for column in new.columns:
        was = types.get(column.name)
        if was is None:
            continue  # It was added, which its own clause decides.
        if was.nullable and not column.nullable:
            return False
        if not is_widening(was.type_name, column.type_name):
            return False
    return True


def is_widening(old: str, new: str) -> bool:
    """Whether a type has every value of another one, in the same text."""
    if old == new:
        return True
    sign = " unsigned"
    if old.endswith(sign) == new.endswith(sign):
        for widths in _WIDTHS:
            narrow, wide = old.removesuffix(sign), new.removesuffix(sign)
            if narrow in widths and wide in widths:
                return widths.index(narrow) <= widths.index(wide)
    was, now = _SIZED.fullmatch(old), _SIZED.fullmatch(new)
    if was and now:
        return was[1] == now[1] and int(was[2] or 0) <= int(now[2] or 0)
    return old.startswith(_LISTED) and new.startswith(old.removesuffix(")") + ",")
