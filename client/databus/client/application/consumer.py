"""What an application writes: a ``Consumer``, and the results that its callbacks may return."""

from __future__ import annotations

import enum
from collections.abc import Awaitable
from typing import TYPE_CHECKING, TypeAlias

from databus.client.application.events import Event, Window
from databus.common.checkpoint import Checkpoint
from databus.common.errors import DatabusError
from databus.common.schema.source_schema import SourceSchema
from databus.common.table_state import TableState


class Result(enum.Enum):
    """What a callback returns; None is SUCCESS."""

    SUCCESS = "success"
    CHECKPOINT = "checkpoint"
    """Success, and take a checkpoint at the end of this window whatever the cadence."""
    SKIP_CHECKPOINT = "skip_checkpoint"
    """Success, but take no checkpoint at the end of this window."""
    ERROR = "error"
    """Roll back to the last checkpoint and call again from there."""
    ERROR_FATAL = "error_fatal"
    """Stop at once."""


if TYPE_CHECKING:
    from databus.client.tables.data_batch import DataBatch

Answer: TypeAlias = "Result | Awaitable[Result | None] | None"


class Consumer:
    """The application's side of a subscription.  This text is the delivery guarantee.

    Override what you need; every method may be plain or ``async``, and may return a
    ``Result`` or None.

    Order:
        O1. Callbacks come in the order of the Databus paper, section 3.6::

                onStartConsumption
                    onStartDataEventSequence
                        onStartSource
                            onDataEvent ...
                        onEndSource ...
                    onEndDataEventSequence
                    onCheckpoint ...
                onStopConsumption

            One sequence is one window: all events of one source transaction that pass the
            filters, in commit order, in runs of one source each.  (A source may open again
            within the window: events stay in commit order and are not grouped.)
        O2. Windows come in commit order, whole or, after a failure, again from their start.
        O3. One callback runs at a time with ``dispatch="serial"``.  With ``"within_window"``
            the data events of one run go to several workers by key; with
            ``"across_windows"`` those of several windows do.  Events of one key always stay in
            order and on one worker.
        O4. While a bootstrap runs (``window.mode == "bootstrap"``) a sequence is a piece of
            the snapshot or of the log after it, cut at the bootstrap's checkpoints.  The state
            of all tables together is a state that the database had only from the checkpoint
            with ``mode`` online on.

    Tables:
        T1. A table is followed until ``onTableState`` reports another state.  While it is
            suspended or resynchronising, your copy may differ from it.  When it is followed
            again, the rows, deletions and truncates delivered in between have made your copy
            equal again.  The call comes between sequences, at least once for each change, and at
            the start for each table that is not followed then.

    Durability:
        D1. ``onCheckpoint(checkpoint)`` requests a recovery point: make durable what was
            delivered so far, and return.  Only then is the checkpoint stored; after a crash
            consumption resumes just after the stored one.
        D2. A checkpoint lies between windows (or at a bootstrap's checkpoint), never inside,
            and nothing after it has been delivered yet; only with ``"across_windows"`` are
            workers ahead of it.
        D3. A checkpoint that you skip, or that fails, is not stored.

    Duplicates:
        U1. Every committed change arrives at least once.  After a rollback or a crash
            everything after the last stored checkpoint arrives again, in the same order, with
            the same ``position``.
        U2. Exactly once: write the checkpoint in the transaction that makes the events durable,
            with ``DatabaseCheckpoints`` or ``AsyncpgCheckpoints``, or with code of your own and
            ``ApplicationCheckpoints`` (not with ``"across_windows"``, whose workers are ahead
            of the checkpoint).
        U3. For one key an older state follows a newer one only in a replay: after
            ``onRollback`` or a restart.  A bootstrap sends rows as they were at some time up to
            its target, and the client stores nothing per key to suppress repetitions.  So apply
            rows as upserts, and ignore deletes of absent keys.

    Failure:
        F1. An exception, ``Result.ERROR`` or a callback over ``callback_budget_s`` is
            recoverable: ``onRollback(checkpoint)`` is called, then everything after that
            checkpoint comes again, after a pause that doubles each time.  The same happens,
            without a pause, when a relay is lost in the middle of a window.
        F2. After ``max_retries`` failures without a new checkpoint in between, at
            ``Result.ERROR_FATAL``, at a CheckpointMoved or UsageError from ``onCheckpoint``,
            at a failing ``onRollback`` or ``onStartConsumption``, and at a stream that cannot be
            continued, ``onError`` is called and the client stops with that error.
        F3. ``onStopConsumption`` is the last callback, whatever happened.
        F4. With ``dead_letters``, an event for which ``onDataEvent`` has failed ``max_retries`` + 1
            times does not stop the client: after ``onRollback`` it is stored as a dead letter, and
            its window comes again without it.  From then on events of its key are stored behind
            it and not delivered (after a failing truncate: all events of its source), so U3 holds.
            A letter is durable before a checkpoint covers its event.  A replay calls
            ``onDataEvent`` with the letters of a key in order, in a window of its own for each, and
            ``onCheckpoint`` with the stored checkpoint.  A truncate that is delivered ends the
            letters of its source before it.

    Control:
        C1. After ``client.pause()`` no callback begins until ``client.resume()``.  The client
            reads ahead ``buffer_bytes``, and no window is lost.
        C2. ``client.seek(to)`` takes effect between windows.  What was delivered is made durable
            by ``onCheckpoint``, or rolled back if that fails or is skipped.  Then the new
            position is stored, ``onRollback(new position)`` is called, and what follows that
            position comes.  Nothing that was fetched before comes after it.

    Threads: callbacks run in the event loop's thread, and a plain one that blocks also blocks
    the loop.  With the parallel modes a plain ``onDataEvent`` runs on worker threads;
    ``dispatch="within_window", workers=1`` moves it off the loop without any parallelism.  A
    thread cannot be interrupted: a plain callback that has not returned when its budget is
    over stops the client (on a worker), or fails when it returns (on the loop).
    """

    def onStartConsumption(self) -> Answer:
        """Consumption begins."""
        return None

    def onStartDataEventSequence(self, window: Window) -> Answer:
        """A window begins."""
        return None

    def onStartSource(self, source: str, schema: SourceSchema) -> Answer:
        """A run of events of one source begins; ``schema`` is its latest known version."""
        return None

    def onDataEvent(self, event: Event) -> Answer:
        """A row was changed, or read by a dump."""
        return None

    def onDataBatch(self, batch: DataBatch) -> Answer:
        """Many rows of one source at once; instead of ``onDataEvent``, if you override it.

        The rows are those of one window or of several whole ones, and no checkpoint lies between
        them.  The order of rows of different sources is lost between two checkpoints.
        """
        return None

    def onEndSource(self, source: str, schema: SourceSchema) -> Answer:
        """The run ends."""
        return None

    def onEndDataEventSequence(self, window: Window) -> Answer:
        """The window ends; ``window.txid`` and ``window.event_count`` are known now."""
        return None

    def onTableState(self, source: str, state: TableState) -> Answer:
        """A table is followed, suspended or resynchronising from here on; see T1."""
        return None

    def onCheckpoint(self, checkpoint: Checkpoint) -> Answer:
        """Everything up to ``checkpoint`` has been delivered: make it durable."""
        return None

    def onRollback(self, checkpoint: Checkpoint | None) -> Answer:
        """Events after ``checkpoint`` (None: the start) come next: discard what you have of them.

        After a ``seek`` forward, ``checkpoint`` lies ahead of what was delivered.
        """
        return None

    def onError(self, error: DatabusError) -> Answer:
        """Consumption cannot continue, and stops."""
        return None

    def onStopConsumption(self) -> Answer:
        """Consumption has stopped."""
        return None
