"""One dead letter: an event, why it is one, and what is needed to deliver it again."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from databus.client.application.events import Decoding, Event, Mode, Window
from databus.client.application.frame_blocks import Block
from databus.client.application.options import Options
from databus.client.tables.data_batch import BatchDecoding, DataBatch
from databus.common.checkpoint import Position
from databus.common.errors import FormatError
from databus.common.schema.source_schema import SchemaSet, SourceSchema

BEHIND = "behind"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """An event that the consumer could not take, or one of the same key that came after it."""

    database: str
    """The database."""
    source: str
    """The table, as schema.table."""
    scn: int
    """The commit's number on the source's clock."""
    seq: int
    """The event's index within the scn."""
    op: str
    """c, u, d, r or t."""
    mode: Mode
    """online, or bootstrap."""
    error: str
    """The last error; ``behind`` if only an earlier event of its key has failed."""
    attempt_count: int
    """How often the consumer was called with it in vain."""
    stored_us: int
    """When it was stored, microseconds since the epoch, UTC."""
    frames: bytes
    """The event's frame, and that of its window's end if it had arrived."""
    schema: dict[str, Any]
    """The schema of the row."""

    @property
    def position(self) -> Position:
        """(scn, seq)."""
        return Position(self.scn, self.seq)

    @property
    def key_bytes(self) -> bytes:
        """The key as Avro bytes; empty for a truncate."""
        return bytes(Block(self.frames, bootstrap=False).frame(0).key)

    @property
    def key_hash(self) -> int:
        """xxh3 of the key bytes; partitions are defined by it."""
        return int(Block(self.frames, bootstrap=False).key_hashes[0])

    @classmethod
    def of(cls, event: Event, error: str, attempt_count: int) -> DeadLetter:
        """The event as a dead letter."""
        return cls(
            database=event.database,
            source=event.source,
            scn=event.scn,
            seq=event.seq,
            op=event.op,
            mode=event.window.mode,
            error=error,
            attempt_count=attempt_count,
            stored_us=time.time_ns() // 1000,
            frames=event.frames,
            schema=event.schema.to_json(),
        )

    def event(self, options: Options | None = None) -> Event:
        """The event as it was delivered.

        Raises:
            FormatError: its bytes are damaged.
        """
        block = Block(self.frames, bootstrap=False)
        window = Window(self._decoding(options or Options()), self.mode, block, 0)
        if block.count > 1:
            window.ended_by(block, 1)
        return Event(block, 0, window)

    def batch(self) -> DataBatch:
        """The row as a batch of one, in the mode of a bootstrap.

        It may have been written with an older version of its table, to which no target goes back.
        """
        decoding = BatchDecoding(self._decoding(Options(objects=False)))
        block = Block(self.frames, bootstrap=False)
        rows = np.zeros(1, dtype=np.int64)
        return DataBatch(decoding, self.source, "bootstrap", [(block, rows)])

    def _decoding(self, options: Options) -> Decoding:
        schemas = SchemaSet([SourceSchema.from_json(self.schema)])
        return Decoding(self.database, schemas, options.reader_schemas, objects=options.objects)

    def to_json(self) -> str:
        """The letter as one line of JSON, in ASCII."""
        return json.dumps(asdict(self) | {"frames": base64.b64encode(self.frames).decode()})

    @classmethod
    def from_json(cls, text: str | bytes) -> DeadLetter:
        """The letter in a line of JSON.

        Raises:
            FormatError: it is not one.
        """
        try:
            found = json.loads(text)
            return cls(**found | {"frames": base64.b64decode(found["frames"])})
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError(f"this is not a dead letter: {error!r}") from error
