"""The stream's position in the server's binlog files."""

from __future__ import annotations

from databus.relay.sources.mysql.protocol import binlog_events
from databus.relay.sources.mysql.protocol.binlog_events import Header
from databus.relay.sources.mysql.protocol.compressed_events import PlainRows
from databus.relay.sources.mysql.protocol.transaction_payload import Payload


class EventCursor:
    """The end of the last event that was read.

    Invariants:
        I1. ``offset`` is where that event ends in ``file``.  ``server_offset`` is the last end
            position that the server named; within a transaction MariaDB 11.4 names none.
        I2. The events of ``payload``, which is read before the next event of the stream, do not
            move the cursor and have no checksums.

    ``checksums`` is whether the events of the stream have checksums, ``is_stopped`` whether the
    server was shut down at the end of ``file``.

    Owner: the task that reads the stream.
    """

    def __init__(self) -> None:
        self.file = ""
        self.offset = self.server_offset = 0
        self.checksums = self.is_stopped = False
        self.payload: Payload | PlainRows | None = None

    @property
    def has_checksum(self) -> bool:
        """Whether the next event has a checksum."""
        return self.checksums and self.payload is None

    def begin_of(self, header: Header) -> int:
        """Where the next event begins."""
        return header.end_after(self.offset) - header.length

    def where(self, header: Header) -> str:
        """The location of the next event, for messages."""
        if self.payload is not None:
            return self.payload.where
        return f"binlog {self.file or '(start)'} at {self.begin_of(header)}"

    def rotate(self, header: Header, body: memoryview) -> bool:
        """Continue in the file that a ROTATE event names.

        False if the server wrote nothing at the end of the file before: it was not shut down.
        """
        before, was_stopped = self.file, self.is_stopped
        self.file, self.offset = binlog_events.read_rotate(body)
        self.server_offset, self.is_stopped = self.offset, False
        is_named = not header.flags & binlog_events.ARTIFICIAL
        return is_named or was_stopped or before in ("", self.file)

    def pass_event(self, header: Header) -> None:
        """Move behind an event of the file."""
        self.offset = header.end_after(self.offset)
        if header.end_offset:
            self.server_offset = self.offset
