"""Which targets a sink writes, and which it must not.  Pure, but for the driver's hash of slots."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from databus.client.sinks.sink_batch import SinkRow
from databus.common.errors import ConfigError, SinkRefused

_HASH_TAG = re.compile(r"\{[^{}]+\}")
_FIELD = "target:"


class RedisTargets:
    """The targets of a sink.

    Invariants:
        I1. In a cluster, every key has the slot of the checkpoint.
        I2. No key belongs to two hash targets.  A hash target has the rows of one source, under
            the same key columns; the field ``target:TARGET`` of the checkpoint has both.

    Owner: one sink.
    """

    def __init__(self, key: str, stored: Mapping[str, str], *, is_cluster: bool) -> None:
        self._key, self._is_cluster = key, is_cluster
        self._streams: set[str] = set()
        self._hashes: dict[str, str] = {
            field.removeprefix(_FIELD): text
            for field, text in stored.items()
            if field.startswith(_FIELD)
        }
        self._fresh: list[str] = []
        self._checked: tuple[str, str, tuple[str, ...]] | None = None

    def check_stream(self, target: str) -> None:
        """Raises: ConfigError: the stream cannot be written."""
        if target not in self._streams:
            self._check_slot(target)
            self._streams.add(target)

    def check_hash(self, row: SinkRow, key: tuple[str, ...]) -> tuple[str, str] | None:
        """The field and its value to store in the transaction, for a target that is new.

        Raises:
            ConfigError, SinkRefused: the hash cannot be written.
        """
        found = (row.target, row.source, key)
        if found == self._checked:
            return None
        text = json.dumps({"source": row.source, "key": key})
        known = self._hashes.get(row.target)
        if known is None:
            self._check_slot(row.target)
            self._check_names(row.target)
        elif known != text:
            self._refuse(row, key, json.loads(known))
        self._checked = found
        if known is not None:
            return None
        self._hashes[row.target] = text
        self._fresh.append(row.target)
        return f"{_FIELD}{row.target}", text

    def commit(self) -> None:
        """The fields of ``check_hash`` are stored."""
        self._fresh.clear()

    def rollback(self) -> None:
        """They are not."""
        for target in self._fresh:
            del self._hashes[target]
        self._fresh.clear()
        self._checked = None

    def _refuse(self, row: SinkRow, key: tuple[str, ...], known: Mapping[str, object]) -> None:
        if known["source"] != row.source:
            raise ConfigError(
                f"{known['source']} and {row.source} both go to {row.target}: give each source a "
                "target of its own, such as target = '{schema}.{table}'"
            )
        raise SinkRefused(
            f"the hashes {row.target}:* have the key {known['key']}, and {row.source} has the key "
            f"{list(key)} now: delete them and the key {self._key}, and start the sink again; "
            "it begins with the whole tables"
        )

    def _check_slot(self, target: str) -> None:
        if not self._is_cluster:
            return
        from redis.crc import key_slot

        slots = {key_slot(one.encode()) for one in (target, self._key)}
        if not _HASH_TAG.search(target) or len(slots) > 1:
            raise ConfigError(
                f"in a cluster the target {target!r} and checkpoint_key must have one hash tag in "
                "common, such as target = '{{shop}}:{source}' and checkpoint_key = "
                "'{shop}:databus:{name}': a transaction cannot span slots"
            )

    def _check_names(self, target: str) -> None:
        for other in self._hashes:
            short, long = sorted((target, other), key=len)
            if long.startswith(f"{short}:"):
                raise ConfigError(
                    f"keys of the targets {short!r} and {long!r} look the same: choose "
                    "targets of which none is the beginning of another"
                )
