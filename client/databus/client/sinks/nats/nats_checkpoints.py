"""The key-value bucket of the checkpoints: the key is the sink's name."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from databus.client.sinks.nats.nats_library import as_ours, nats_library
from databus.common.checkpoint import Checkpoint, Position, decode, decode_position, encode
from databus.common.errors import CheckpointMoved


@dataclass(frozen=True, slots=True)
class BucketCheckpoint:
    """What a key of the bucket has."""

    owner: str
    """The process that uses the name."""
    sequence: int
    """The last message of the stream that the checkpoint covers."""
    checkpoint: Checkpoint | None
    written: Position | None = None
    """Up to where the stream has all changes, if that is after the checkpoint."""
    revision: int = 0
    """Revision of the key."""

    def to_json(self) -> bytes:
        """The value of the key."""
        checkpoint = None if self.checkpoint is None else json.loads(encode(self.checkpoint))
        document = {"owner": self.owner, "sequence": self.sequence, "checkpoint": checkpoint}
        if self.written is not None:
            document["written"] = self.written.to_json()
        return json.dumps(document).encode()


class NatsCheckpoints:
    """Reads and replaces one key; each change names the revision that it replaces.

    Owner: one event loop.
    Raises: SinkUnavailable, SinkRefused.
    """

    def __init__(self, bucket: Any, name: str) -> None:
        self._bucket, self._name = bucket, name

    async def load(self) -> BucketCheckpoint | None:
        """What is stored; None if nothing is."""
        with as_ours("reading the checkpoint"):
            try:
                entry = await self._bucket.get(self._name)
            except nats_library().js.errors.KeyNotFoundError:
                return None
        document = json.loads(entry.value)
        text = document["checkpoint"]
        return BucketCheckpoint(
            document["owner"],
            document["sequence"],
            None if text is None else decode(json.dumps(text)),
            decode_position(document["written"]) if "written" in document else None,
            entry.revision,
        )

    async def replace(
        self, before: BucketCheckpoint | None, after: BucketCheckpoint
    ) -> BucketCheckpoint:
        """Store ``after`` in the place of ``before``.

        Raises:
            CheckpointMoved: something else was stored meanwhile.
        """
        errors = nats_library().js.errors
        with as_ours("storing the checkpoint"):
            try:
                if before is None:
                    revision = await self._bucket.create(self._name, after.to_json())
                else:
                    revision = await self._bucket.update(
                        self._name, after.to_json(), last=before.revision
                    )
            except errors.KeyWrongLastSequenceError as error:
                raise CheckpointMoved(
                    f"another process has changed the checkpoint of the sink {self._name}"
                ) from error
        return dataclasses.replace(after, revision=revision)


async def checkpoint_bucket(jetstream: Any, name: str, replicas: int) -> Any:
    """The bucket; created unless it is there."""
    errors = nats_library().js.errors
    with as_ours(f"opening the bucket {name}"):
        try:
            return await jetstream.key_value(name)
        except errors.BucketNotFoundError:
            return await jetstream.create_key_value(
                bucket=name, replicas=replicas, description="Checkpoints of databus sinks"
            )
