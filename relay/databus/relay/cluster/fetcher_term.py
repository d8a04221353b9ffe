"""A fetcher's part in a cluster: the leader's term in the ring, the leader's state at a follower.

A follower copies what the leader would need to resume: the resume state of the source.  The mark
of a term in the stream is the sign that it has changed in a way that the windows after it need.
"""

from __future__ import annotations

import json
import logging
from typing import Any, NamedTuple

from databus.common.checkpoint import Position
from databus.common.errors import FormatError, from_answer
from databus.common.frame.frame_format import scan
from databus.common.table_state import CaptureState
from databus.relay.capture.intake import Intake
from databus.relay.capture.leader_term import LeaderTerm, newest_mark
from databus.relay.cluster.leadership import Leadership
from databus.relay.dumps.dump_records import ACTIVE, DumpBook, DumpState
from databus.relay.dumps.table_records import TableBook
from databus.relay.ring.data_folder import DatabaseFolder, naming, read_leader, write_leader
from databus.relay.sources.contract import Batch, RelayingSource, Source

_log = logging.getLogger(__name__)


class CopiedState(NamedTuple):
    """The leader's resume state, as of the position ``at``."""

    at: Position
    text: str

    def encode(self) -> str:
        """See ``contract.ResumeState``."""
        return self.text


class FetcherTerm:
    """What a fetcher does because its relay is in a cluster; nothing without one.

    Invariants:
        I1. The epoch on disk grows, and is there before the ring has a frame of its term.
        I2. A dump, or a resynchronisation, ends with the term in which it began: readers of another
            leader may lack a part of its windows.
        I3. A copied resume state is used only once the ring has come to its position, and a
            follower copies one before it takes what follows a mark.

    Owner: the fetcher's event loop.
    """

    def __init__(self, folder: DatabaseFolder, leadership: Leadership | None) -> None:
        self._folder = folder
        self._leadership = leadership
        self._is_mark_due = False
        self._pending: list[CopiedState] = []
        with naming(folder.leader):
            self.epoch, self.leader = read_leader(folder)

    def guard(self) -> None:
        """Refuse to append if the lease of a leader has ended.

        Raises:
            LeadershipLost.
        """
        if self._leadership is not None:
            self._leadership.require()

    def take_over_records(self, dumps: DumpBook, tables: TableBook, *, follows: bool) -> None:
        """Before the fetcher runs: what another term has begun is not continued."""
        term = self._leadership
        if not follows and (term is None or term.epoch == self.epoch):
            return
        for dump in dumps:
            if dump.state in ACTIVE or dump.state == DumpState.PAUSED:
                dump.state = DumpState.CANCELLED
                _log.warning("dump %s ends: the term in which it began has ended", dump.id)
        for record in tables:
            record.cure = ""
            if record.state == CaptureState.RESYNCHRONISING or record.dump:
                record.suspend("the relay that resynchronised it no longer leads", 0)

    # -- the leader --

    async def begin(self, source: Source, intake: Intake) -> int:
        """Lead, once the source is open; returns an scn up to which earlier leaders may have shown.

        The source's last scn is asked for after the lease began, and what a leader appends was
        read before its lease ended: so it is at or after all that an earlier leader has shown.
        """
        term = self._leadership
        if term is None:
            return -1
        term.require()
        if intake.term.epoch != term.epoch:
            status = await source.status()
            shown_scn = status.get("scn", status.get("current_scn"))
            term.require()
            self._note(LeaderTerm(term.epoch, term.relay))
            intake.term = LeaderTerm(term.epoch, term.relay, int(shown_scn or 0))
            _log.info("leader with the epoch %d; after %s", term.epoch, intake.complete)
        self._is_mark_due = True
        return intake.term.shown_scn

    def mark(self, intake: Intake) -> bool:
        """The resume state on disk has changed: followers copy it before they go on."""
        self._is_mark_due = self._leadership is not None
        return self._marked(intake)

    def _marked(self, intake: Intake) -> bool:
        if not self._is_mark_due or not intake.mark_term():
            return False
        self._is_mark_due = False
        return True

    def ackable(self, complete: Position) -> int:
        """The scn up to which the source may be acknowledged, if the ring is on disk up to
        ``complete``; -1 if it may not be."""
        if self._leadership is None:
            return complete.scn
        return self._leadership.ackable(complete) if self._leadership.holds else -1

    def followed(self, follower: str, position: Position) -> None:
        """A follower reports what it has on disk."""
        if self._leadership is not None:
            self._leadership.followed(follower, position)

    # -- beside the stream --

    def took(self, intake: Intake) -> bool:
        """A batch of the database is in the ring; whether a mark follows it."""
        return self._marked(intake)

    def relayed(self, batch: Batch) -> bool:
        """A batch of a leader is in the ring; whether its resume state is to be copied."""
        mark = newest_mark(scan(batch.data, verify=False), memoryview(batch.data))
        if mark is not None:
            self._note(mark)
        return mark is not None

    async def copy(self, origin: RelayingSource) -> None:
        """Copy the leader's resume state.

        Raises:
            DatabusError: the leader does not answer.
        """
        status, body = await origin.forward("GET", "/resume_state", b"")
        if status >= 400:
            raise from_answer("the leader", status, body)
        try:
            document = json.loads(body)
            at = Position(int(document["at"]["scn"]), int(document["at"]["seq"]))
            copied = CopiedState(at, str(document["state"]))
            # A follower that is ahead of the leader's mark does not meet it in the stream.
            self._note(LeaderTerm(int(document["epoch"]), str(document["leader"])))
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"the leader gave a resume state without {error!r}") from error
        if copied.text:
            self._pending = [*self._pending[-1:], copied]

    def copied(self, complete: Position) -> CopiedState | None:
        """The newest copied state to which the ring has come, if it is new."""
        ready = [state for state in self._pending if state.at <= complete]
        self._pending = [state for state in self._pending if state.at > complete]
        return ready[-1] if ready else None

    def _note(self, term: LeaderTerm) -> None:
        if term.epoch > self.epoch:
            self.epoch, self.leader = term.epoch, term.relay
            write_leader(self._folder, term.epoch, term.relay)

    def document(self) -> dict[str, Any]:
        """For the status."""
        followers = self._leadership.followers() if self._leadership is not None else {}
        return {"epoch": self.epoch, "leader": self.leader, "followers": followers}
