"""The error that suspends a table: its change cannot be interpreted with certainty."""

from __future__ import annotations

from databus.common.errors import UnsupportedChange


class TableUncertain(UnsupportedChange):
    """The effect of a change on one table is unknown; other tables are not affected."""

    code = "table_uncertain"
    hint = "Only this table is suspended; see docs/operations/resynchronisation.md for the cure."
