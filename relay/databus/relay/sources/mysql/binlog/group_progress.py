"""How far a stream has come in the transactions of the server."""

from __future__ import annotations

from databus.relay.sources.mysql.gtid.foreign_gtids import ForeignGtids
from databus.relay.sources.mysql.gtid.mysql_lineage import GroupLocation, LineageMark, require_same


class GroupProgress:
    """The groups that the stream has begun and ended.

    Invariants:
        I1. ``resolved`` is the scn of the last finished group of the domain, and no group at or
            below it is still to come.
        I2. ``mark`` is the group ``resolved``, if its server and time are known, and
            ``mark_location`` is where it begins (MariaDB).

    ``last_seq_no`` is the scn of the last group of the domain that began, ``begins_after`` an scn
    at or before the one that the first group follows.  ``ends`` (MySQL) has the last number of
    each server, ``foreign`` (MariaDB) that of each other domain.  ``expected`` is the transaction
    that the server's history must have.  ``group_begin`` is where the last group begins in its
    file.  ``foreign_groups`` counts the groups of other domains and servers, ``other_groups``
    those without events.

    Owner: the stream's decoder.
    """

    def __init__(self, after_scn: int) -> None:
        self.resolved = after_scn
        self.last_seq_no = self.begins_after = 0
        self.ends: tuple[int, ...] = ()
        self.foreign = ForeignGtids()
        self.expected: LineageMark | None = None
        self.mark: LineageMark | None = None
        self.mark_location: GroupLocation | None = None
        self.group_begin = 0
        self.foreign_groups = self.other_groups = 0

    @property
    def last_scn(self) -> int:
        """An scn at or after every group that has begun, also before the first one."""
        return max(self.last_seq_no, self.begins_after)

    def recognise(self, found: LineageMark, where: str) -> None:
        """Check that this server's history has the transaction ``expected``.

        Raises:
            SourcePositionLost: it has another one.
        """
        if self.expected is not None and found.scn >= self.expected.scn:
            require_same(found, self.expected, where)
            self.expected, self.mark = None, found
