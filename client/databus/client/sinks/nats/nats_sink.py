"""The NATS sink: changes as messages of a JetStream stream, each once and in commit order."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, ClassVar

from databus.client.checkpoints.checkpoint_table import new_owner
from databus.client.sinks.nats.nats_checkpoints import (
    BucketCheckpoint,
    NatsCheckpoints,
    checkpoint_bucket,
)
from databus.client.sinks.nats.nats_library import as_ours, connected, nats_library
from databus.client.sinks.nats.nats_subjects import default_subject, is_taken, subject_of_target
from databus.client.sinks.nats.stream_writer import Message, StreamWriter
from databus.client.sinks.row_changes import RowRecords
from databus.client.sinks.sink import Sink, SinkContext
from databus.client.sinks.sink_batch import BEGINNING, SinkBatch, SinkRow
from databus.common.checkpoint import Checkpoint, OnlineCheckpoint, Position
from databus.common.envelopes.json_encoding import JsonEncoding
from databus.common.envelopes.row_change import EnvelopeRecord
from databus.common.errors import CheckpointMoved, SinkRefused
from databus.common.sink_config import NatsSinkConfig


class NatsSink(Sink):
    """Publishes the changes to one stream, and stores the checkpoint in a key-value bucket.

    Delivery: exactly once for changes that a relay delivers.  In a bootstrap, a change may be there
    twice if the sink was killed and starts again after more than the duplicate window.

    Invariants:
        I1. The stream has the changes in commit order, without a gap (``StreamWriter``, I1).  The
            last message therefore has the position up to which all changes are there.
        I2. The checkpoint names the last message that it covers.  Messages after it were published
            and not committed: their changes are skipped when they come again.
        I3. One process at a time uses a name: the last one that opened it.

    Owner: one event loop.
    Durability: the server's, when ``commit`` returns.
    Raises: SinkUnavailable, SinkRefused, CheckpointMoved.
    """

    stores_checkpoint: ClassVar[bool] = True
    default_target: ClassVar[str] = ""

    def __init__(self, config: NatsSinkConfig) -> None:
        self._config = config
        self._records = RowRecords(config.envelope, prefix=config.prefix, tombstones=False)
        self._encoding = JsonEncoding()
        self._context: SinkContext | None = None
        self._owner = new_owner()
        self._connection: Any = None
        self._checkpoints: NatsCheckpoints | None = None
        self._writer: StreamWriter | None = None
        self._subjects: dict[tuple[str, str], str] = {}
        self._stream_subjects: tuple[str, ...] = ()
        self._stored: BucketCheckpoint | None = None
        self._committing: Checkpoint | None = None
        # Up to where changes that come again are in the stream.
        self._written: Position | None = None
        self._opened_at = BEGINNING

    async def open(self, context: SinkContext) -> Checkpoint | None:
        """Connect, and claim the checkpoint."""
        self._context, self._owner = context, new_owner()
        await self._connect()
        assert self._checkpoints is not None
        found = await self._checkpoints.load()
        last = await self._opened_stream(found)
        before = found or BucketCheckpoint("", last, None)
        claimed = dataclasses.replace(before, owner=self._owner)
        self._stored = await self._checkpoints.replace(found, claimed)
        self._committing, self._written = None, before.written
        self._opened_at = before.checkpoint.position if before.checkpoint else BEGINNING
        await self._begin_after(last, self._stored)
        return self._stored.checkpoint

    async def write(self, batch: SinkBatch) -> None:
        """Publish the changes; some are not acknowledged yet."""
        writer = await self._ready()
        assert self._context is not None
        if self._is_of_stored_clock() and self._written is not None:
            batch = batch.after(self._written, self._opened_at)
        for row in batch.rows():
            for record in self._records.of(row, self._context):
                await writer.publish(self._message(row, record))

    async def commit(self, checkpoint: Checkpoint) -> None:
        """Wait for the acknowledgements, then store the checkpoint."""
        writer = await self._ready()
        assert self._stored is not None
        assert self._checkpoints is not None
        await writer.settle()
        before = self._stored.checkpoint
        # If a commit was made although it was reported as failed, its changes come again.
        if before and before.clock == checkpoint.clock and checkpoint.position < before.position:
            checkpoint = before
        self._committing = checkpoint
        written = self._written
        if written is not None and written <= checkpoint.position:
            written = None
        after = BucketCheckpoint(self._owner, writer.last, checkpoint, written)
        self._stored = await self._checkpoints.replace(self._stored, after)
        self._committing = None

    async def rollback(self) -> None:
        """Close the connection; the next call opens another one."""
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection, self._writer = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(nats_library().errors.Error, OSError):
                await connection.close()

    async def _connect(self) -> None:
        await self.close()
        assert self._context is not None
        config = self._config
        self._connection = await connected(
            [url.reveal for url in config.servers],
            name=self._context.name,
            credentials=config.credentials,
            timeout_s=config.timeout,
            on_close=self._connection_closed,
        )
        jetstream = self._jetstream()
        bucket = await checkpoint_bucket(jetstream, config.bucket, config.replicas)
        self._checkpoints = NatsCheckpoints(bucket, self._context.name)

    def _jetstream(self) -> Any:
        return self._connection.jetstream(timeout=self._config.timeout)

    async def _connection_closed(self) -> None:
        if self._writer is not None:
            self._writer.fail()

    async def _ready(self) -> StreamWriter:
        """The writer, on a new connection after a failure.

        Raises:
            CheckpointMoved: another process has the name.
        """
        if self._writer is not None:
            return self._writer
        await self._connect()
        assert self._checkpoints is not None
        assert self._stored is not None
        found = await self._checkpoints.load()
        if found is None or found.owner != self._owner:
            raise CheckpointMoved(
                "the sink's name was taken over by "
                f"{found.owner if found else 'a process that deleted the checkpoint'}"
            )
        committing, self._committing = self._committing, None
        if found.checkpoint != self._stored.checkpoint and (
            found.checkpoint != committing or not isinstance(committing, OnlineCheckpoint)
        ):
            raise CheckpointMoved(
                "the checkpoint was stored although that was reported as failed; start the sink "
                "again"
            )
        self._stored = found
        if isinstance(found.checkpoint, OnlineCheckpoint):
            self._written = max(self._written or BEGINNING, found.checkpoint.position)
        return await self._begin_after(await self._opened_stream(found), found)

    async def _opened_stream(self, stored: BucketCheckpoint | None) -> int:
        """The sequence of the stream's last message; the stream is created if it is missing.

        Raises:
            SinkRefused: there is no stream, or it has lost messages.
        """
        jetstream, name, missing = self._jetstream(), self._stream, nats_library().js.errors
        with as_ours(f"opening the stream {name}"):
            try:
                info = await jetstream.stream_info(name)
            except missing.NotFoundError:
                if not self._config.create:
                    raise SinkRefused(
                        f"there is no stream {name}; create it, or set create = true"
                    ) from None
                info = await self._created_stream(jetstream)
        self._stream_subjects = tuple(info.config.subjects or ())
        self._subjects.clear()
        last = int(info.state.last_seq)
        if stored is not None and last < stored.sequence:
            raise SinkRefused(
                f"the stream {name} ends at message {last}, and the checkpoint covers message "
                f"{stored.sequence}: the server has lost messages, or the stream was made again. "
                f"To begin with the whole tables, delete the key of the sink in the bucket "
                f"{self._config.bucket}"
            )
        return last

    async def _created_stream(self, jetstream: Any) -> Any:
        config = self._config
        window_s = config.duplicate_window
        return await jetstream.add_stream(
            name=self._stream,
            subjects=list(config.subjects) or [f"{self._prefix}.>"],
            num_replicas=config.replicas,
            max_age=config.max_age,
            max_bytes=config.max_bytes or -1,
            duplicate_window=min(window_s, config.max_age) if config.max_age else window_s,
        )

    async def _begin_after(self, last: int, stored: BucketCheckpoint) -> StreamWriter:
        """A writer after the last message; what follows the checkpoint is not published again."""
        if last > stored.sequence:
            position = await self._position_of(last)
            if position is not None:
                self._written = max(self._written or BEGINNING, position)
        self._writer = StreamWriter(self._connection, self._stream, last, self._config.timeout)
        return self._writer

    async def _position_of(self, sequence: int) -> Position | None:
        """The position of a message; None of one that a bootstrap gave, or that is gone.

        Raises:
            SinkRefused: it is not this sink's.
        """
        assert self._context is not None
        with as_ours("reading the last message"):
            try:
                headers = (await self._jetstream().get_msg(self._stream, sequence)).headers or {}
            except nats_library().js.errors.NotFoundError:
                return None
        if headers.get("sink") != self._context.name:
            raise SinkRefused(
                f"message {sequence} of the stream {self._stream} is from another publisher; give "
                "the sink a stream of its own"
            )
        if headers.get("mode") == "bootstrap":
            return None
        return Position(int(headers["scn"]), int(headers["seq"]))

    def _message(self, row: SinkRow, record: EnvelopeRecord) -> Message:
        assert self._context is not None
        scn, seq = row.position
        headers = {
            "Nats-Msg-Id": f"{self._context.database}:{scn}:{seq}",
            "sink": self._context.name,
            "scn": str(scn),
            "seq": str(seq),
            "op": row.op,
            **dict(record.headers),
        }
        if row.event.window.mode == "bootstrap":
            headers["mode"] = "bootstrap"
        if record.key_type is not None:
            headers["key"] = self._encoding.text(record.key_type, record.key)
        value = b""
        if record.value_type is not None:
            value = self._encoding.encode("", record.value_type, record.value)
        return Message(self._subject(row), value, headers)

    def _subject(self, row: SinkRow) -> str:
        """Raises: SinkRefused: the stream does not take it."""
        found = self._subjects.get((row.source, row.target))
        if found is not None:
            return found
        subject = (
            subject_of_target(row.target)
            if row.target
            else default_subject(self._prefix, row.source)
        )
        if not is_taken(subject, self._stream_subjects):
            raise SinkRefused(
                f"the stream {self._stream} has the subjects {', '.join(self._stream_subjects)}, "
                f"and not {subject}; add it to the stream"
            )
        self._subjects[row.source, row.target] = subject
        return subject

    def _is_of_stored_clock(self) -> bool:
        """Whether positions of the stream can be compared with the stored ones."""
        assert self._context is not None
        stored = self._stored.checkpoint if self._stored else None
        return stored is None or self._context.clock() in ("", stored.clock)

    @property
    def _prefix(self) -> str:
        assert self._context is not None
        return self._config.prefix or subject_of_target(self._context.database)

    @property
    def _stream(self) -> str:
        assert self._context is not None
        return self._config.stream or self._context.name.replace(".", "_")
