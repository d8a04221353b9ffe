"""From the bytes of a QUERY event to a ``Statement``."""

from __future__ import annotations

from databus.common.errors import UnsupportedChange
from databus.relay.sources.mysql.protocol import binlog_events
from databus.relay.sources.mysql.rows.charsets import Charsets
from databus.relay.sources.mysql.statements import Statement


def logged_statement(
    header: binlog_events.Header, body: memoryview, charsets: Charsets | None = None
) -> Statement:
    """The statement in a QUERY event's body, decoded with the session's character set."""
    found = binlog_events.read_query_event(body)
    return Statement(
        found.schema,
        _text(found.text, found.collation, charsets),
        found.sql_mode,
        bool(header.flags & binlog_events.THREAD_SPECIFIC),
    )


def _text(data: bytes, collation: int, charsets: Charsets | None) -> str:
    """Invalid characters become the replacement character, which is in no name."""
    if charsets is not None and collation and not data.isascii():
        try:
            return charsets.of_collation(collation).decoder()(data)
        except UnsupportedChange:
            pass  # such as a binary string in a statement of text
    return data.decode("utf-8", "replace")
