"""The Redis sink: entries of streams, or rows as hashes, with the checkpoint in one transaction."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import ClassVar

from databus.client.checkpoints.checkpoint_table import new_owner
from databus.client.sinks.redis.redis_rows import Text, hash_arguments, hash_key, keys_pattern
from databus.client.sinks.redis.redis_scripts import EMPTY, ENTRIES, ROWS
from databus.client.sinks.redis.redis_targets import RedisTargets
from databus.client.sinks.redis.redis_transaction import RedisTransactions
from databus.client.sinks.row_changes import RowRecords
from databus.client.sinks.sink import Sink, SinkContext
from databus.client.sinks.sink_batch import BEGINNING, SinkBatch, SinkRow
from databus.common.checkpoint import Checkpoint, OnlineCheckpoint, Position
from databus.common.envelopes.json_encoding import JsonEncoding
from databus.common.errors import CheckpointMoved, SinkRefused
from databus.common.sink_config import RedisSinkConfig
from databus.common.table_state import TableState

_CHUNK_ARGUMENTS = 8000
_CHUNK_BYTES = 1 << 20


class Writing(ABC):
    """Rows as scripts of one kind: gathered in chunks, each of which is one call of the server."""

    script: ClassVar[str]
    begins_with: tuple[Text, ...] = ()

    def __init__(self, targets: RedisTargets) -> None:
        self._targets = targets
        self._keys: list[Text] = []
        self._arguments: list[Text] = []
        self._bytes = 0

    @abstractmethod
    def add(self, row: SinkRow, to: RedisTransactions) -> None:
        """Write a row; it may remain in the chunk."""

    def flush(self, to: RedisTransactions) -> None:
        """Queue the chunk."""
        if self._keys:
            to.run(self.script, self._keys, [*self.begins_with, *self._arguments])
        self.clear()

    def clear(self) -> None:
        """Forget the chunk."""
        self._keys, self._arguments, self._bytes = [], [], 0

    def _append(self, key: Text, arguments: list[Text], to: RedisTransactions) -> None:
        self._keys.append(key)
        self._arguments.extend(arguments)
        self._bytes += sum(map(len, arguments))
        if len(self._arguments) >= _CHUNK_ARGUMENTS or self._bytes >= _CHUNK_BYTES:
            self.flush(to)


class HashWriting(Writing):
    """A hash for each row, ``TARGET:KEY``."""

    script = ROWS

    def add(self, row: SinkRow, to: RedisTransactions) -> None:
        """Set, or delete, the hash of a row; a truncate empties the target."""
        if row.op == "t":
            self.flush(to)
            scn, seq = row.position
            to.run(EMPTY, [], [keys_pattern(row.target), str(scn), str(seq)])
            return
        key = row.key
        if not key:
            raise SinkRefused(f"{row.source} has no key, which a hash needs; use kind = 'streams'")
        record = self._targets.check_hash(row, tuple(key))
        if record is not None:
            to.set_fields(*record)
        self._append(hash_key(row.target, key.values()), hash_arguments(row), to)


class StreamWriting(Writing):
    """An entry of the stream TARGET for each record of the envelope."""

    script = ENTRIES

    def __init__(
        self, targets: RedisTargets, records: RowRecords, context: SinkContext, max_length: int
    ) -> None:
        super().__init__(targets)
        self.begins_with = (str(max_length) if max_length else "",)
        self._records, self._context = records, context
        self._encoding = JsonEncoding()

    def add(self, row: SinkRow, to: RedisTransactions) -> None:
        """Append the records of a row."""
        scn, seq = row.position
        self._targets.check_stream(row.target)
        for record in self._records.of(row, self._context):
            fields: list[Text] = ["scn", str(scn), "seq", str(seq), "op", row.op]
            if record.key_type is not None:
                key = self._encoding.encode("", record.key_type, record.key)
                fields += ["key", key]
            if record.value_type is not None:
                fields += ["value", self._encoding.encode("", record.value_type, record.value)]
            self._append(row.target, [str(len(fields) // 2), *fields], to)


class RedisSink(Sink):
    """Writes to streams or hashes; rows and checkpoint are one MULTI.

    Delivery: exactly once.

    Invariants:
        I1. Rows and checkpoint take effect together (``RedisTransactions``, I3).
        I2. One process at a time uses a name: the last one that opened it.
        I3. A hash is never replaced by an older row: each has the position of its last change.

    Owner: the sink's thread.
    Durability: the server's, when ``commit`` returns.  A server that loses its last commits loses
    their checkpoints with them.
    Raises: SinkUnavailable, SinkRefused, CheckpointMoved.
    """

    stores_checkpoint: ClassVar[bool] = True
    default_target: ClassVar[str] = "{source}"

    def __init__(self, config: RedisSinkConfig) -> None:
        self._config = config
        self._context: SinkContext | None = None
        self._transactions: RedisTransactions | None = None
        self._writing: Writing | None = None
        self._targets: RedisTargets | None = None
        self._stored: Checkpoint | None = None
        self._committing: Checkpoint | None = None
        # Up to where rows that come again are there already.
        self._written: Position | None = None
        self._opened_at = BEGINNING

    def open(self, context: SinkContext) -> Checkpoint | None:
        """Connect, and claim the checkpoint."""
        self.close()
        config, self._context = self._config, context
        key = config.checkpoint_key.replace("{name}", context.name)
        transactions = RedisTransactions(config.url.reveal, key, new_owner(), config.timeout)
        self._stored = transactions.claim().checkpoint
        self._opened_at = self._stored.position if self._stored else BEGINNING
        self._targets = RedisTargets(
            key, transactions.fields(), is_cluster=transactions.is_in_cluster()
        )
        self._transactions = transactions
        self._written = self._committing = None
        if config.kind == "hashes":
            self._writing = HashWriting(self._targets)
        else:
            records = RowRecords(config.envelope, prefix=config.prefix, tombstones=False)
            self._writing = StreamWriting(self._targets, records, context, config.max_length)
        return self._stored

    def write(self, batch: SinkBatch) -> None:
        """Queue the rows in the transaction."""
        transactions = self._begun()
        assert self._writing is not None
        for row in self._new_rows(batch).rows():
            self._writing.add(row, transactions)

    def commit(self, checkpoint: Checkpoint) -> None:
        """Execute the transaction with the checkpoint."""
        transactions = self._begun()
        assert self._writing is not None
        assert self._targets is not None
        self._writing.flush(transactions)
        stored = self._stored
        # If a commit was made although it was reported as failed, its rows come again.
        if stored and stored.clock == checkpoint.clock and checkpoint.position < stored.position:
            checkpoint = stored
        self._committing = checkpoint
        transactions.execute(checkpoint)
        self._stored, self._committing = checkpoint, None
        self._targets.commit()

    def rollback(self) -> None:
        """Close the connection; the next call opens another one."""
        assert self._transactions is not None
        assert self._writing is not None
        assert self._targets is not None
        self._transactions.close()
        self._writing.clear()
        self._targets.rollback()
        self._skip_written()

    def table_state(self, state: TableState) -> None:
        """Write the state into the hash of the checkpoint, as the field ``state:SOURCE``."""
        text = {"state": str(state.state), "since_scn": state.since_scn, "reason": state.reason}
        self._begun().set_fields(f"state:{state.source}", json.dumps(text))

    def close(self) -> None:
        """Close the connection."""
        if self._transactions is not None:
            self._transactions.close()

    def _begun(self) -> RedisTransactions:
        """The open transaction.

        Raises:
            CheckpointMoved: another process has the name, or the server has lost a commit.
        """
        transactions = self._transactions
        assert transactions is not None
        if not transactions.is_open:
            found = transactions.begin().checkpoint
            if found != self._stored:
                self._adopt(found, transactions)
        return transactions

    def _adopt(self, found: Checkpoint | None, transactions: RedisTransactions) -> None:
        """Continue after a commit that was made although its answer was lost."""
        committing, self._committing = self._committing, None
        if found != committing or not isinstance(found, OnlineCheckpoint):
            raise CheckpointMoved(
                f"the checkpoint {transactions.key} is {found}, and this process stored "
                f"{self._stored}; start the sink again"
            )
        self._stored = found
        self._skip_written()

    def _skip_written(self) -> None:
        if isinstance(self._stored, OnlineCheckpoint):
            self._written = self._stored.position

    def _new_rows(self, batch: SinkBatch) -> SinkBatch:
        stored = self._stored
        assert self._context is not None
        if self._written is None or stored is None:
            return batch
        if self._context.clock() not in ("", stored.clock):  # Its positions are of another kind.
            return batch
        return batch.after(self._written, self._opened_at)
