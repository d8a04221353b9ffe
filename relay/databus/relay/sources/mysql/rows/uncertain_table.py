"""The error that suspends a table: its change cannot be interpreted with certainty."""

from __future__ import annotations

from databus.common.errors import UnsupportedChange


class TableUncertain(UnsupportedChange):
    """What a change of one table means cannot be known; those of other tables can."""

    code = "table_uncertain"
    hint = "Only this table is suspended; see docs/operations/resynchronisation.md for the cure."
