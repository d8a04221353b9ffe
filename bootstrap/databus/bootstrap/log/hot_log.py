"""The hot log: the newest windows, in LMDB, with the writer's checkpoint in the same commit.

It appends frames exactly once, reads them back after a position, and stores the small facts that
must be durable together with them (clock, schemas, seeding, gaps). ``log_writer`` gets the frames,
and ``segments`` moves them to runs.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from databus.bootstrap.log.log_blocks import (
    check_blocks,
    check_order,
    cut_values,
    is_after,
    position_at,
    tail_after,
)
from databus.bootstrap.log.log_values import (
    ParsedNotes,
    block_bounds,
    damage,
    drop_frames,
    is_sealed,
    naming,
    open_fact,
    pack_position,
    pack_schema,
    schema_key,
    seal_fact,
    unpack_position,
    unpack_schema,
)
from databus.bootstrap.log.map_gate import MapGate
from databus.bootstrap.runs import failpoints
from databus.common import checkpoint as checkpoints
from databus.common.checkpoint import OnlineCheckpoint, Position
from databus.common.errors import (
    BadCheckpoint,
    ClockMismatch,
    FormatError,
    StoreError,
)
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op
from databus.common.private import make_folder
from databus.common.schema.source_schema import SchemaSet, SourceSchema
from databus.common.storage.lmdb_file import SizeGuard, check_lmdb

FORMAT = 1
FOLDER = "log"
FIRST_MAP_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LogState:
    """What the log holds at one moment.

    Frames after ``start`` are retained; those up to ``window`` are whole windows; the checkpoint
    is later than ``window`` while a large window is coming in.  ``frame_bytes`` counts the retained
    bytes, and ``since_us`` is when the oldest of them arrived (0 if the log is empty).
    """

    database: str
    clock: str
    start: Position
    window: Position
    checkpoint: OnlineCheckpoint
    frame_bytes: int
    since_us: int

    @property
    def last(self) -> Position:
        """The last frame's position, or a later heartbeat's."""
        return self.checkpoint.position

    def at(self, position: Position) -> OnlineCheckpoint:
        """The writer's checkpoint at another position."""
        return OnlineCheckpoint(self.database, self.clock, position)


@dataclass(frozen=True, slots=True)
class LogSlice:
    """Whole frames read from the log, in order, up to and including ``stop``."""

    data: bytes
    stop: Position


class HotLog:
    """Frames after ``state().start``, in commit order, each exactly once.

    Invariants:
        I1. Keys ascend; each is the position of the last frame of its value.
        I2. A value holds whole frames; it ends with the end of a window, or is inside one.
        I3. ``start`` <= ``window`` <= ``last``; ``window`` is where a value ends, or later
            with no frame between.
        I4. The checkpoint is the position of the last frame that came, heartbeats included.
        I5. All frames are of one database and one clock.

    ``append_count`` and ``window_count`` show how many windows one commit takes in: waiting
    windows are committed together.  ``note_revision`` grows when this process stores a note, but
    the writer's state.

    Owner: one writer process (the store's lease keeps it single), in which a thread may append
    while another one seals; other processes read.
    Durability: when a method returns, everything that it wrote is on disk; if it fails, nothing.
    Raises: StoreError for what LMDB refuses; ClockMismatch; FormatError for a truncated file, and
        for bytes that are no frames or not in order.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        if read_only and not (folder / "data.mdb").exists():
            raise StoreError(f"{folder} holds no log yet; is the log writer running?")
        self.folder = folder
        self._gate = MapGate()
        self._read_only = read_only
        self._is_broken = False
        self.note_revision = 0
        self._known: tuple[SourceSchema, ...] = ()
        self._notes = ParsedNotes()
        self.append_count = 0
        self.window_count = 0
        try:
            if not read_only:
                make_folder(folder)
            self._open()
        except (OSError, lmdb.Error) as error:
            raise StoreError(f"{folder / 'data.mdb'}: {error}") from error

    def _open(self) -> None:
        create = not self._read_only
        self._guard = SizeGuard(self.folder)
        self._env = lmdb.open(
            str(self.folder),
            map_size=max(FIRST_MAP_BYTES, 2 * check_lmdb(self.folder)),
            max_dbs=4,
            readonly=self._read_only,
            create=create,
            lock=True,
        )
        self._frames = self._env.open_db(b"frames", create=create)
        self._facts = self._env.open_db(b"facts", create=create)
        self._schemas = self._env.open_db(b"schemas", create=create)

    def _open_again(self) -> None:
        try:
            with self._gate.alone():
                self._env.close()
                self._open()
                self._is_broken = False
        except (OSError, lmdb.Error) as error:
            raise StoreError(f"{self.folder} cannot be opened again: {error}") from error

    def close(self) -> None:
        """Close the environment once no thread reads it, for that would end by SIGSEGV."""
        with self._gate.alone():
            self._env.close()

    # -- transactions -------------------------------------------------------------------

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Any]:
        self._guard.check()
        try:
            try:
                with self._gate.passing(), self._env.begin(buffers=True) as transaction:
                    yield transaction
                    return
            except lmdb.MapResizedError:
                with self._gate.alone():
                    self._env.set_mapsize(0)
            with self._gate.passing(), self._env.begin(buffers=True) as transaction:
                yield transaction
        except lmdb.Error as error:
            raise StoreError(f"{self.folder}: {error}") from error

    def _write(self, change: Any) -> None:
        """Run ``change(transaction)`` and commit; the map grows until it fits."""
        if self._is_broken:
            self._open_again()
        while True:
            self._guard.check()
            try:
                with self._gate.passing(), self._env.begin(write=True) as transaction:
                    change(transaction)
                    failpoints.reach("append.before_commit")
                failpoints.reach("append.committed")
                return
            except lmdb.MapFullError:
                with self._gate.alone():
                    self._env.set_mapsize(2 * self.map_bytes())
            except lmdb.Error as error:
                if isinstance(error, lmdb.PanicError):
                    # The disk failed at a commit's last page.  After LMDB is opened again it has
                    # the state before the commit; the next step retries.
                    self._is_broken = True
                    with contextlib.suppress(StoreError, FormatError):
                        self._open_again()
                free_bytes = shutil.disk_usage(self.folder).free  # a full disk is an EIO here
                raise StoreError(
                    f"{self.folder}: {error}; this step stored nothing, {free_bytes:,} bytes "
                    "are free on its disk"
                ) from error

    # -- facts --------------------------------------------------------------------------

    def is_new(self) -> bool:
        """Whether no stream has been bound to this log yet."""
        with self._reading() as transaction:
            return self._fact(transaction, b"clock") is None

    def bind(
        self,
        database: str,
        clock: str,
        start: Position,
        *,
        notes: Mapping[str, Any] | None = None,
        schemas: Sequence[SourceSchema] = (),
    ) -> None:
        """Bind a new log to this database and clock; it begins at ``start``.

        That is its origin, unless ``notes`` and ``schemas`` are those of a log that is restored.
        A log that has a clock already is only checked.

        Raises:
            ClockMismatch: the log belongs to another clock.
        """
        if not self.is_new():
            state = self.state()
            if (state.database, state.clock) != (database, clock):
                raise ClockMismatch(
                    f"the log in {self.folder} holds {state.database} of clock {state.clock}, "
                    f"the relay serves {database} of clock {clock}; move the folder away to "
                    "begin again"
                )
            return

        def change(transaction: Any) -> None:
            facts = {"format": str(FORMAT), "database": database, "clock": clock}
            for name, value in facts.items():
                self._put_fact(transaction, name.encode(), value.encode())
            self._put_range(transaction, start, start, 0, 0)
            self._put_checkpoint(transaction, OnlineCheckpoint(database, clock, start))
            self._put_notes(transaction, {"origin": start.to_json()} if notes is None else notes)
            for number, schema in enumerate(schemas):
                transaction.put(*pack_schema(number, schema), db=self._schemas)

        self._write(change)

    def state(self) -> LogState:
        """What the log holds now.

        Raises:
            StoreError: no stream was bound to it yet, or it is of another format.
        """
        with self._reading() as transaction:
            return self._state(transaction)

    def _state(self, transaction: Any) -> LogState:
        def fact(name: str) -> bytes:
            value = self._fact(transaction, name.encode())
            if value is None:
                raise StoreError(f"the log in {self.folder} is empty; is the log writer running?")
            return value

        if fact("format") != str(FORMAT).encode():
            raise StoreError(
                f"the log in {self.folder} has format {fact('format')!r}, this program "
                f"reads {FORMAT}"
            )
        try:
            position = checkpoints.decode(fact("checkpoint"))
            if not isinstance(position, OnlineCheckpoint):
                raise FormatError(f"the log in {self.folder} has the checkpoint {position}")
            numbers = json.loads(fact("numbers"))
            start, window = fact("start"), fact("window")
            with naming(self.folder):
                return LogState(
                    database=fact("database").decode(),
                    clock=fact("clock").decode(),
                    start=unpack_position(start),
                    window=unpack_position(window),
                    checkpoint=position,
                    frame_bytes=int(numbers["frame_bytes"]),
                    since_us=int(numbers["since_us"]),
                )
        except BadCheckpoint as error:
            raise FormatError(f"the log in {self.folder}: {error.message}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise damage(self.folder, f"its facts: {error!r}") from error

    def _fact(self, transaction: Any, name: bytes) -> bytes | None:
        found = transaction.get(name, db=self._facts)
        must = is_sealed(transaction.get(b"format", db=self._facts))
        with naming(self.folder):
            if found is not None:
                return open_fact(name, bytes(found), must_be_sealed=must)
            # It may be stored under a name that was damaged.
            for other, value in transaction.cursor(self._facts):
                open_fact(bytes(other), bytes(value), must_be_sealed=must)
            return None

    def _put_fact(self, transaction: Any, name: bytes, text: bytes) -> None:
        transaction.put(name, seal_fact(name, text), db=self._facts)

    def _put_range(
        self,
        transaction: Any,
        start: Position,
        window: Position,
        frame_bytes: int,
        since_us: int,
    ) -> None:
        self._put_fact(transaction, b"start", pack_position(start))
        self._put_fact(transaction, b"window", pack_position(window))
        numbers = {"frame_bytes": frame_bytes, "since_us": since_us}
        self._put_fact(transaction, b"numbers", json.dumps(numbers).encode())

    def _put_checkpoint(self, transaction: Any, value: OnlineCheckpoint) -> None:
        self._put_fact(transaction, b"checkpoint", checkpoints.encode(value).encode())

    def _put_notes(self, transaction: Any, notes: Mapping[str, Any]) -> None:
        self.note_revision += set(notes) != {"writer"}
        for name, document in notes.items():
            self._put_fact(transaction, b"note." + name.encode(), json.dumps(document).encode())

    def note(self, name: str) -> Any:
        """The JSON document stored beside the frames (seeding, gaps), None if there is none.

        The caller must not change it: it is the same one until another is stored.
        """
        with self._reading() as transaction:
            value = self._fact(transaction, b"note." + name.encode())
        try:
            return None if value is None else self._notes.parse(name, value)
        except ValueError as error:
            raise damage(self.folder, f"the note {name!r}: {error}") from error

    def put_note(self, name: str, document: Any) -> None:
        """Store a JSON document."""
        self._write(lambda transaction: self._put_notes(transaction, {name: document}))

    def schemas(self) -> list[SourceSchema]:
        """All schema versions that frames of this log may name, in the order of announcement.

        A version that a table returned to is listed again; the last one of a source is current.
        """
        known = self._known
        with self._reading() as transaction:
            cursor = transaction.cursor(self._schemas)
            found = cursor.set_range(schema_key(len(known)))
            rows = [(bytes(key), bytes(value)) for key, value in cursor] if found else []
        if rows:
            with naming(self.folder):
                new = [unpack_schema(number, *row) for number, row in enumerate(rows, len(known))]
            self._known = known = (*known, *new)
        return list(known)

    def add_schemas(self, schemas: Iterable[SourceSchema]) -> None:
        """Store versions that are not there yet, and those that a table has returned to."""
        stored, announced = self.schemas(), SchemaSet(schemas)
        known = SchemaSet(stored)
        new = [schema for schema in announced if schema.fingerprint not in known]
        known = SchemaSet([*stored, *new])
        for source in announced.sources:
            current = announced.latest(source)
            if current is not None and current != known.latest(source):
                new.append(current)

        def change(transaction: Any) -> None:
            for number, schema in enumerate(new, len(stored)):
                transaction.put(*pack_schema(number, schema), db=self._schemas)

        if new:
            self._write(change)

    # -- frames -------------------------------------------------------------------------

    def append(self, block: bytes, now_us: int, *, verify: bool = True) -> Position:
        """Add whole frames and move the checkpoint, in one commit; returns the checkpoint.

        Frames at or before the last one are dropped (a stream that was resumed), and so are
        heartbeats, which only move the checkpoint.

        Raises:
            FormatError: the block is not whole frames in ascending order; nothing was added.
        """
        columns = frame_format.scan(block, verify=verify)
        if columns.stop != len(block):
            raise FormatError(
                f"a block of {len(block)} bytes ends inside a frame at {columns.stop}"
            )
        if not len(columns):
            return self.state().last
        check_order(columns)
        is_row = columns.op != Op.HEARTBEAT
        checkpoint, windows = position_at(columns, len(columns) - 1), 0

        def change(transaction: Any) -> None:
            # Read here: a sealing thread may drop frames until the transaction begins.
            nonlocal checkpoint, windows
            state = self._state(transaction)
            is_new = is_after(columns, state.last) & is_row
            pieces = list(cut_values(block, columns, is_new))
            checkpoint = max(state.last, checkpoint)
            if not pieces and checkpoint == state.last:
                return
            for piece in pieces:
                key = pack_position(piece.stop)
                if not transaction.put(key, piece.data, db=self._frames, overwrite=False):
                    raise FormatError(f"two blocks end at {piece.stop}")
            is_open = not pieces[-1].ends_window if pieces else state.window < state.last
            if is_open:
                window = max((p.stop for p in pieces if p.ends_window), default=state.window)
            else:
                window = checkpoint
            added = sum(len(piece.data) for piece in pieces)
            since_us = state.since_us or (now_us if added else 0)
            self._put_range(transaction, state.start, window, state.frame_bytes + added, since_us)
            self._put_checkpoint(transaction, state.at(checkpoint))
            windows = int((columns.op[is_new] == Op.END_OF_WINDOW).sum())

        self._write(change)
        self.append_count += 1
        self.window_count += windows
        return checkpoint

    def advance(self, position: Position) -> None:
        """Move the checkpoint after a heartbeat: nothing up to ``position`` is still to come."""
        if position <= self.state().last:
            return

        def change(transaction: Any) -> None:
            state = self._state(transaction)
            window = state.window if state.window < state.last else position
            self._put_range(transaction, state.start, window, state.frame_bytes, state.since_us)
            self._put_checkpoint(transaction, state.at(position))

        self._write(change)

    def read(self, after: Position, upto: Position, max_bytes: int) -> LogSlice | None:
        """Frames after ``after`` and up to ``upto``, about ``max_bytes`` of them.

        ``upto`` is a ``window`` that the log had.  None means that the log does not reach back
        to ``after`` (any more): that part is in a segment.  A slice without data means that
        there is nothing between the two.
        """
        pieces: list[bytes] = []
        size, stop = 0, max(after, upto)
        with self._reading() as transaction:
            start = self._fact(transaction, b"start")
            if start is None or unpack_position(start) > after:
                return None
            cursor = transaction.cursor(self._frames)
            found = cursor.set_range(pack_position(after))
            last = self._before(cursor, after, found=found)
            while found and (key := self._key(bytes(cursor.key()))) <= upto:
                if size >= max_bytes:
                    return LogSlice(b"".join(pieces), stop)
                data = bytes(cursor.value())
                with naming(self.folder):
                    first, end = block_bounds(data, verify=True)
                if not last < first <= end == key:
                    raise damage(
                        self.folder, f"the block at {key} holds {first} to {end}, after {last}"
                    )
                if key > after:
                    pieces.append(data if pieces else tail_after(data, after))
                    size, stop = size + len(pieces[-1]), key
                last, found = key, cursor.next()
            if found:
                self._require_key(cursor)  # or a block after ``upto`` has a key before it
        return LogSlice(b"".join(pieces), max(after, upto))

    def _before(self, cursor: Any, after: Position, *, found: bool) -> Position:
        """The end of the block before the cursor; the cursor does not move."""
        if not (cursor.prev() if found else cursor.last()):
            if found:
                cursor.first()
            return Position(0, 0)
        last = self._require_key(cursor)
        if last >= after:
            raise damage(self.folder, f"the block at {last} comes before {after}")
        if found:
            cursor.next()
        return last

    def _key(self, key: bytes) -> Position:
        with naming(self.folder):
            return unpack_position(key)

    def _require_key(self, cursor: Any) -> Position:
        """The key at the cursor, which is where its block ends."""
        key = self._key(bytes(cursor.key()))
        with naming(self.folder):
            _, end = block_bounds(bytes(cursor.value()), verify=False)
        if key != end:
            raise damage(self.folder, f"the block at {key} ends at {end}")
        return key

    def drop_until(self, position: Position, now_us: int) -> None:
        """Drop frames up to ``position``, the end of a window that a run has.

        A log that has not come so far continues there.  Retained frames count as having arrived
        at ``now_us``.
        """

        def change(transaction: Any) -> None:
            # A reader that was killed inside a transaction would hold its pages forever.
            self._env.reader_check()
            state = self._state(transaction)
            cursor = transaction.cursor(self._frames)
            frame_bytes = state.frame_bytes - drop_frames(cursor, position)
            if state.start >= position:
                return
            window, since_us = max(state.window, position), now_us if frame_bytes else 0
            self._put_range(transaction, position, window, frame_bytes, since_us)
            if state.last < position:
                self._put_checkpoint(transaction, state.at(position))

        self._write(change)

    def restart_at(self, position: Position, notes: dict[str, Any]) -> None:
        """Drop everything and continue after ``position``, the new origin; a gap lies before it.

        ``notes`` (the record of the gap, the sources to be seeded again) are written in the
        same commit.
        """

        def change(transaction: Any) -> None:
            state = self._state(transaction)
            transaction.drop(self._frames, delete=False)
            self._put_range(transaction, position, position, 0, 0)
            self._put_checkpoint(transaction, state.at(position))
            self._put_notes(transaction, {"origin": position.to_json(), **notes})

        self._write(change)

    def bridge_to(self, position: Position, notes: dict[str, Any]) -> None:
        """Keep all frames and continue after ``position``; the frames between are unknown.

        A window whose end is lost is dropped.  ``notes`` (the record of the gap, the sources to be
        repaired) are written in the same commit.
        """

        def change(transaction: Any) -> None:
            state = self._state(transaction)
            cursor = transaction.cursor(self._frames)
            dropped = 0
            found = cursor.set_range(pack_position(state.window))
            while found:
                if unpack_position(bytes(cursor.key())) > state.window:
                    dropped += len(cursor.value())
                    cursor.delete()
                    found = len(cursor.key()) > 0
                else:
                    found = cursor.next()
            frame_bytes = state.frame_bytes - dropped
            since_us = state.since_us if frame_bytes else 0
            self._put_range(transaction, state.start, position, frame_bytes, since_us)
            self._put_checkpoint(transaction, state.at(position))
            self._put_notes(transaction, notes)

        self._write(change)

    # -- inspection
    def check(self) -> int:
        """Assert I1-I4 over everything that is stored; returns the number of frames.

        Raises:
            FormatError: with the block that is wrong.
        """
        with self._reading() as transaction, naming(self.folder):
            state = self._state(transaction)
            blocks = ((self._key(bytes(k)), bytes(v)) for k, v in transaction.cursor(self._frames))
            return check_blocks(blocks, state.start, state.window, state.last, state.frame_bytes)

    def map_bytes(self) -> int:
        """Size of the memory map, which LMDB enlarges when needed."""
        return int(self._env.info()["map_size"])
