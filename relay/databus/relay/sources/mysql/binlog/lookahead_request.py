"""What the decoder needs before it can decode an event."""

from __future__ import annotations

from dataclasses import dataclass

from databus.relay.sources.mysql.statements import Statement


@dataclass(frozen=True, slots=True)
class LookaheadRequest:
    """A request for the catalogue, and for the statements between an event and that catalogue.

    The event ends at ``offset`` of ``file``.  ``server_offset`` is the last end position that the
    server named up to there.  ``gtid`` is the transaction of the event, "" if it is skipped.

    ``is_for_statement``: the event is a statement, for which foreign keys with actions are needed,
    and with ``with_knowledge`` views, triggers and routines.  If ``statement`` is set, only its
    result is needed, and the statements after it only as far as that result depends on them.
    """

    file: str = ""
    offset: int = 0
    server_offset: int = 0
    gtid: str = ""
    is_for_statement: bool = False
    with_knowledge: bool = False
    statement: Statement | None = None
