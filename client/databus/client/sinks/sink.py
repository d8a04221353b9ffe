"""What a sink is: the methods that write changes to another system, and what they promise."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from databus.common.checkpoint import Checkpoint
from databus.common.errors import ConfigError
from databus.common.table_state import TableState

if TYPE_CHECKING:
    from databus.client.sinks.sink_batch import SinkBatch
    from databus.client.sinks.sink_routes import SinkRoutes


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkContext:
    """What a sink is opened with."""

    name: str
    """The name of the sink, under which it stores its checkpoint."""
    database: str
    """The database that it reads."""
    routes: SinkRoutes
    """Where the rows of each source go."""
    clock: Callable[[], str] = lambda: ""
    """The clock of the stream, from the first row on: ``mariadb:...``, ``postgresql:...``."""


class Sink:
    """Writes changes to another system.  This text is the contract between a sink and its runner.

    Override what you need.  Every method may be plain or ``async``.  Plain methods run one at a
    time on one thread of the sink's own, so that they may block and may own a connection that
    belongs to a thread.

    Order:
        S1. ``open`` comes first and ``close`` last.  Between them the calls are
            ``(table_state | write ... commit | rollback) ...``, never two at a time.
        S2. Batches come in commit order, and so do the rows in a batch.  A window that is larger
            than ``batch_rows`` comes in several batches; all other windows are whole in one.
        S3. ``commit(checkpoint)`` comes between windows and covers every batch before it.

    Durability:
        S4. When ``commit`` returns, everything that was written before it is durable.
        S5. With ``stores_checkpoint = True`` the sink stores the checkpoint itself, in the same
            transaction as the rows, and ``open`` returns it: each change takes effect exactly once.
            Otherwise the runner stores the checkpoint in a file after ``commit``: after a crash the
            batches since the last commit come again.

    Resolved:
        S6. An ``OnlineCheckpoint`` in ``commit`` is a resolved position: no event at or below it is
            still to come, except repetitions after a rollback or a restart.  A sink that publishes
            resolved marks publishes them there, and only for such a checkpoint.

    Idempotence:
        S7. After a failure ``rollback`` is called, and everything since the last commit comes again
            in the same order with the same positions, perhaps in other batches.  So a sink discards
            what it has not committed, or it writes in such a way that a repetition changes nothing:
            by key, guarded by the position.

    Failure:
        S8. An exception is retried, with a pause that doubles each time.  The exceptions are
            ``SinkRefused``, ``ConfigError``, ``MissingDependency`` and ``CheckpointMoved``: they
            stop the sink, because a retry cannot help.
        S9. ``RowRefused`` says that the target does not take the values of a row.  With
            ``refused = "set-aside"`` the rows of that batch come again one at a time, each refusal
            is followed by ``rollback``, and the sink continues without the refused rows.
    """

    stores_checkpoint: ClassVar[bool] = False
    """Whether the sink stores its checkpoint itself, with the rows."""
    default_target: ClassVar[str] = "{source}"
    """The target of a source without a route."""

    def open(self, context: SinkContext) -> Checkpoint | Awaitable[Checkpoint | None] | None:
        """Connect.  Returns the stored checkpoint of a sink that stores it; None without one."""
        return None

    def write(self, batch: SinkBatch) -> Awaitable[None] | None:
        """Write the rows; they need not be durable yet."""
        raise ConfigError(f"{type(self).__name__} has no method write(batch)")

    def commit(self, checkpoint: Checkpoint) -> Awaitable[None] | None:
        """Make durable what was written so far, and all of it or nothing if the sink can."""
        raise ConfigError(
            f"{type(self).__name__} has no method commit(checkpoint); a sink needs one"
        )

    def rollback(self) -> Awaitable[None] | None:
        """Discard what was written since the last ``commit``, as far as the sink can."""
        return None

    def table_state(self, state: TableState) -> Awaitable[None] | None:
        """A table is followed, suspended or resynchronising from here on; see ``Consumer``, T1."""
        return None

    def close(self) -> Awaitable[None] | None:
        """Release connections; what was not committed is lost."""
        return None
