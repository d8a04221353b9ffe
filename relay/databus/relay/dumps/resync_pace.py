"""When a suspended table is resynchronised, and when again after a failure."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE_S = 5.0
MOST_PAUSE_S = 3600.0
MOST_IDLE_PAUSE_S = 30.0
"""The longest pause after an attempt that read no row, which costs the database little."""
_MOST_DOUBLINGS = 20


@dataclass(frozen=True, slots=True)
class ResyncPace:
    """When the relay dumps a suspended table itself; tests make it short.

    ``alone_s``: if no bootstrap server has reported itself.  ``accompanied_s``: if one has; it
    can claim the table during this time.
    """

    alone_s: float = 10.0
    accompanied_s: float = 120.0
    first_pause_s: float = FIRST_PAUSE_S

    def pause_s(self, tries: int, *, read_rows: bool) -> float:
        """The pause after this number of failed attempts; ``read_rows``: the last one did."""
        longest_s = MOST_PAUSE_S if read_rows else MOST_IDLE_PAUSE_S
        return min(self.first_pause_s * 2.0 ** min(tries - 1, _MOST_DOUBLINGS), longest_s)
