"""Which of several streams has the next window.  Pure.

A window's **merged time** is its commit time, or the time that its stream has reached already if
that is later: commit times go back within a stream, and merged times do not.  Windows come in the
order of their **keys**: merged time, database, scn, part.  A window is next when no stream without
a window can still bring a lower key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class MergeKey(NamedTuple):
    """The place of a window in the merge; ``part`` tells streams of one database apart."""

    us: int
    database: str
    scn: int
    part: str


ORIGIN_KEY = MergeKey(0, "", 0, "")


@dataclass(slots=True)
class _Place:
    """What is known of one stream: its next key is at or after the bound."""

    database: str
    part: str
    us: int = 0
    scn: int = 0
    head: MergeKey | None = None
    is_left: bool = False

    @property
    def bound(self) -> MergeKey:
        return MergeKey(self.us, self.database, self.scn, self.part)


@dataclass(slots=True)
class MergeOrder:
    """Merges the windows of streams.

    Invariants:
        I1. The keys that ``pop`` gives never fall.
        I2. If no stream is left behind, they are the keys of all windows, sorted: they do not
            depend on when a window is offered.
        I3. Windows of one stream come in its own order.

    Owner: one task.
    """

    databases: Mapping[str, str]
    """The database of each stream, by the stream's name."""
    last: MergeKey = ORIGIN_KEY
    _places: dict[str, _Place] = field(init=False)

    def __post_init__(self) -> None:
        self._places = {name: _Place(one, name) for name, one in self.databases.items()}

    def begin(self, name: str, us: int, scn: int) -> None:
        """The stream has come so far, by a checkpoint."""
        place = self._places[name]
        place.us, place.scn = us, scn

    def offer(self, name: str, commit_us: int, scn: int) -> MergeKey:
        """A stream has its next window; a commit time of 0 is none, as in a bootstrap."""
        place = self._places[name]
        assert place.head is None, f"{name} has a window already"
        place.head = MergeKey(max(commit_us, place.us), place.database, max(scn, place.scn), name)
        if place.is_left and place.head >= self.last:
            place.is_left = False
        return place.head

    def promise(self, name: str, us: int, scn: int) -> None:
        """No window at or before ``scn``, and none committed before ``us``, is still to come."""
        place = self._places[name]
        assert place.head is None, f"{name} has a window that the promise may be about"
        place.us, place.scn = max(place.us, us), max(place.scn, scn)
        if place.is_left and place.bound >= self.last:
            place.is_left = False

    def leave(self, name: str) -> None:
        """Do not wait for a stream until it has caught up."""
        self._places[name].is_left = True

    def is_left(self, name: str) -> bool:
        """Whether a stream is left behind."""
        return self._places[name].is_left

    def us(self, name: str) -> int:
        """The merged time that a stream has reached."""
        return self._places[name].us

    def pop(self) -> tuple[str, MergeKey, bool] | None:
        """The stream of the next window, its key, and whether it comes late, for its stream was
        left behind; None if a stream must bring more first."""
        name = self._least()
        if name is None or self.held_by():
            return None
        place = self._places[name]
        assert place.head is not None
        # The windows of a stream that was left behind get the merge's own time.
        is_late = place.head < self.last
        key = self.last = max(place.head, self.last)
        place.us, place.scn = max(place.us, key.us), place.head.scn
        place.head = None
        return name, key, is_late

    def held_by(self) -> list[str]:
        """The streams without a window that must bring more before the next window comes."""
        least = self._least()
        if least is None:
            return [name for name, one in self._places.items() if not one.is_left]
        head = self._places[least].head
        assert head is not None
        return [
            name
            for name, one in self._places.items()
            if one.head is None and not one.is_left and one.bound < head
        ]

    @property
    def resolved_us(self) -> int:
        """Every window with an earlier merged time has been given; late ones apart."""
        waited = [one for one in self._places.values() if not one.is_left]
        return min((one.head or one.bound).us for one in waited) if waited else self.last.us

    def _least(self) -> str | None:
        heads = [(one.head, name) for name, one in self._places.items() if one.head is not None]
        return min(heads)[1] if heads else None
