"""One transaction of Redis after another: checked, filled script by script, executed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from databus.client.sinks.redis.redis_library import as_ours, connected, redis_library, refusal
from databus.client.sinks.redis.redis_scripts import COMMIT
from databus.common.checkpoint import Checkpoint, decode, encode
from databus.common.errors import CheckpointMoved, SinkUnavailable


@dataclass(frozen=True, slots=True)
class ClaimedCheckpoint:
    """What the hash of the checkpoint has."""

    owner: str
    checkpoint: Checkpoint | None


class RedisTransactions:
    """Runs the transactions of one owner of a checkpoint.

    Invariants:
        I1. Between ``begin`` and EXEC the key of the checkpoint is watched, and its owner was this
            process at ``begin``: EXEC does nothing if another process has changed it meanwhile.
        I2. A command is sent only into the MULTI of the connection that ``begin`` checked.
        I3. EXEC stores the checkpoint only if every script before it succeeded.

    Owner: the sink's thread.
    Raises: SinkUnavailable, SinkRefused, CheckpointMoved.
    """

    def __init__(self, url: str, key: str, owner: str, timeout_s: float) -> None:
        self.key = key
        self._url, self._owner, self._timeout_s = url, owner, timeout_s
        self._client: Any = None
        self._script_count = 0
        self.is_open = False

    def claim(self) -> ClaimedCheckpoint:
        """Make this process the owner of the checkpoint; what was stored."""
        self.close()
        with as_ours("connecting"):
            self._client = connected(self._url, self._timeout_s)
            self._client.execute_command("HSET", self.key, "owner", self._owner)
            return self._read()

    def fields(self) -> dict[str, str]:
        """What the hash of the checkpoint has, by field."""
        with as_ours("reading the checkpoint"):
            found = self._connected().hgetall(self.key)
        return {name.decode(): value.decode() for name, value in found.items()}

    def is_in_cluster(self) -> bool:
        """Whether the server is a node of a cluster."""
        with as_ours("reading the server's mode"):
            return bool(self._connected().info("cluster").get("cluster_enabled"))

    def begin(self) -> ClaimedCheckpoint:
        """Open a transaction; what is stored.

        Raises:
            CheckpointMoved: another process has claimed the checkpoint.
        """
        with as_ours("beginning a transaction"):
            client = self._connected()
            client.execute_command("WATCH", self.key)
            found = self._read()
            if found.owner != self._owner:
                raise CheckpointMoved(
                    f"the checkpoint {self.key} was taken over by {found.owner or 'no process'}"
                )
            client.execute_command("MULTI")
        self.is_open, self._script_count = True, 0
        self._queue("HDEL", self.key, "chunks")
        return found

    def run(self, script: str, keys: list[Any], arguments: list[Any]) -> None:
        """Queue a script."""
        self._queue("EVAL", script, len(keys) + 1, self.key, *keys, *arguments)
        self._script_count += 1

    def set_fields(self, *fields: str) -> None:
        """Queue fields and values of the checkpoint's hash."""
        self._queue("HSET", self.key, *fields)

    def execute(self, checkpoint: Checkpoint) -> None:
        """Execute what was queued, and store the checkpoint.

        Raises:
            CheckpointMoved: another process has claimed the checkpoint.
            SinkUnavailable: the answer was lost, a script failed, or the key was written although
                this process still owns it, as by a server that was loading its file at ``begin``.
        """
        self._queue("EVAL", COMMIT, 1, self.key, self._script_count, encode(checkpoint))
        with as_ours("committing"):
            answers = self._client.execute_command("EXEC")
        self.is_open = False
        if answers is None:
            with as_ours("committing"):
                is_ours = self._read().owner == self._owner
            if is_ours:
                raise SinkUnavailable(f"committing: {self.key} was written meanwhile; once more")
            raise CheckpointMoved(f"another process has changed the checkpoint {self.key}")
        failed = [one for one in answers if isinstance(one, Exception)]
        if failed:
            raise refusal("committing", failed[0]) or SinkUnavailable(f"committing: {failed[0]}")

    def close(self) -> None:
        """Close the connection; the server forgets the transaction."""
        client, self._client, self.is_open = self._client, None, False
        if client is not None:
            with contextlib.suppress(redis_library().exceptions.RedisError, OSError):
                client.close()

    def _connected(self) -> Any:
        if self._client is None:
            self._client = connected(self._url, self._timeout_s)
        return self._client

    def _read(self) -> ClaimedCheckpoint:
        owner, text = self._client.execute_command("HMGET", self.key, "owner", "checkpoint")
        return ClaimedCheckpoint((owner or b"").decode(), None if text is None else decode(text))

    def _queue(self, *command: Any) -> None:
        with as_ours("writing"):
            answer = self._client.execute_command(*command)
        if answer != b"QUEUED":
            raise SinkUnavailable(f"writing: the server answered {answer!r}, not QUEUED")
