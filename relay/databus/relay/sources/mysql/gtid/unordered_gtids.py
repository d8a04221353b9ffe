"""The GTIDs of a MySQL stream that are outside of the order of its scns."""

from __future__ import annotations

from databus.relay.sources.mysql.gtid import gtid_sets


class UnorderedGtids:
    """The GTIDs without an scn that were read, and the numbers that may still come.

    ``tagged``, ``foreign`` and ``missed`` are in the server's form, as in ``MySqlResumeState``.

    Owner: the stream's decoder.
    """

    def __init__(self, uuids: tuple[str, ...]) -> None:
        """``uuids`` are the followed servers."""
        self._uuids = uuids
        self._read: gtid_sets.GtidSet = {}
        self._read_text: tuple[str, str] | None = None
        self._missed: gtid_sets.GtidSet = {}
        self.missed = ""

    def restore(self, tagged: str, foreign: str, missed: str) -> None:
        """Continue with the sets of a resume state."""
        self.missed, self._missed = missed, gtid_sets.parse_gtid_set(missed)
        for text in (tagged, foreign):
            self._read.update(gtid_sets.parse_gtid_set(text))
        self._read_text = None

    @property
    def tagged(self) -> str:
        """The tagged GTIDs of followed servers that were read."""
        return self._texts[0]

    @property
    def foreign(self) -> str:
        """The GTIDs of other servers that were read."""
        return self._texts[1]

    @property
    def _texts(self) -> tuple[str, str]:
        if self._read_text is None:
            ours = gtid_sets.tagged_in(self._read, self._uuids)
            others = {name: self._read[name] for name in self._read.keys() - ours.keys()}
            self._read_text = gtid_sets.as_text(ours), gtid_sets.as_text(others)
        return self._read_text

    def note_read(self, server: str, number: int) -> None:
        """Record a GTID without an scn that was read; ``server`` is ``uuid`` or ``uuid:tag``."""
        read = self._read.get(server, ())
        self._read[server] = gtid_sets.union(read, ((number, number),))
        self._read_text = None

    def note_missed(self, server: str, first: int, last: int) -> None:
        """Record numbers that had not come when a larger one had."""
        known = self._missed.get(server, ())
        self._set_missed(server, gtid_sets.union(known, ((first, last),)))

    def note_late(self, server: str, number: int) -> None:
        """Record that a missed number has come."""
        known = self._missed.get(server, ())
        self._set_missed(server, gtid_sets.without(known, ((number, number),)))

    def _set_missed(self, server: str, missed: gtid_sets.Intervals) -> None:
        self._missed[server] = missed
        self.missed = gtid_sets.as_text(self._missed)
