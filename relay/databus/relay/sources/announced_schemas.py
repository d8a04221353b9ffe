"""The definition of each table that the stream announced last, stored over restarts.

A schema-change frame is due when a table's definition differs from the announced one.  After a
restart the server's catalogue cannot replace the announced definition: a table may have been
altered while the relay did not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from databus.common.schema.source_schema import SourceSchema


class AnnouncedSchemas:
    """Fingerprints by source.

    Invariants:
        I1. ``assume`` does not override a stored fingerprint of an earlier stream.
        I2. A fingerprint in doubt is stored with a minus sign.

    Owner: the stream's decoder.
    """

    def __init__(self, stored: str = "") -> None:
        """``stored`` is a text of ``encode``, or "".

        Raises:
            ValueError: it is something else.
        """
        found = json.loads(stored) if stored else {}
        self._announced: dict[str, int] = {}
        self._keys: dict[str, tuple[str, ...]] = {}
        for source, one in found.items():
            # Earlier versions stored no keys.
            fingerprint, key = (one, ()) if isinstance(one, str) else one
            self._announced[str(source)] = int(fingerprint, 16)
            if key:
                self._keys[str(source)] = tuple(map(str, key))
        self._encoded: str | None = stored
        self._schemas: dict[str, SourceSchema] = {}

    @property
    def sources(self) -> Iterable[str]:
        """The tables whose definition was announced."""
        return self._announced.keys()

    def schema(self, source: str) -> SourceSchema | None:
        """The definition that was announced last; None if only its fingerprint is known."""
        found = self._schemas.get(source)
        known = found is not None and found.fingerprint == self.get(source)
        return found if known else None

    def schemas(self) -> dict[str, SourceSchema]:
        """All definitions that were announced last, as far as they are known."""
        found = ((source, self.schema(source)) for source in self._announced)
        return {source: schema for source, schema in found if schema is not None}

    def key(self, source: str) -> tuple[str, ...] | None:
        """The key by which consumers have a table's rows, if it is known."""
        return self._keys.get(source)

    def keys(self) -> dict[str, tuple[str, ...]]:
        """A copy of all known ``key``."""
        return dict(self._keys)

    def forget_schema(self, source: str) -> None:
        """Drop the definition that was announced last: no row has it any more."""
        self._schemas.pop(source, None)
        if self._keys.pop(source, None):
            self._encoded = None

    def get(self, source: str) -> int | None:
        """The fingerprint that was announced last."""
        found = self._announced.get(source)
        return found if found is None else abs(found)

    def is_current(self, schema: SourceSchema) -> bool:
        """Whether a definition was announced last, and no statement may have changed it since."""
        return self._announced.get(schema.source) == schema.fingerprint

    def doubt(self, source: str) -> None:
        """A statement may have changed the definition, and no frame can announce it: the next
        certain one is announced, even if it is the same."""
        if self._announced.get(source, 0) > 0:
            self._announced[source] = -self._announced[source]
            self._encoded = None

    def put(self, schema: SourceSchema) -> None:
        """Record a definition as announced."""
        self._know(schema)
        if self._announced.get(schema.source) != schema.fingerprint:
            self._announced[schema.source] = schema.fingerprint
            self._encoded = None

    def _know(self, schema: SourceSchema) -> None:
        self._schemas[schema.source] = schema
        if self._keys.get(schema.source) != schema.key:
            self._keys[schema.source] = schema.key
            self._encoded = None

    def assume(self, schemas: Iterable[SourceSchema]) -> None:
        """Take the present definitions as announced, for tables without a stored one."""
        for schema in schemas:
            announced = self.get(schema.source)
            if announced is None:
                self.put(schema)
            elif announced == schema.fingerprint:
                self._know(schema)

    def encode(self) -> str:
        """As JSON, to be stored; "" if no schema was announced."""
        if self._encoded is None:
            self._encoded = json.dumps(
                {
                    name: [f"{fp:x}", self._keys.get(name, ())]
                    for name, fp in self._announced.items()
                }
            )
        return self._encoded


class NewSchemas:
    """The schemas that the next batch must bring.

    Invariants:
        I1. A batch brings each schema that its frames use, unless an earlier one has.  A schema to
            which a table returns is brought again.

    Owner: the stream's decoder.
    """

    def __init__(self) -> None:
        self._brought: set[int] = set()
        self._new: list[SourceSchema] = []

    def use(self, schema: SourceSchema, previous: int | None) -> None:
        """A frame uses this schema; ``previous`` is the fingerprint of its table's last one."""
        if schema.fingerprint not in self._brought or previous not in (None, schema.fingerprint):
            self._brought.add(schema.fingerprint)
            self._new.append(schema)

    def take(self) -> tuple[SourceSchema, ...]:
        """Remove and return them, for a batch."""
        taken, self._new = tuple(self._new), []
        return taken
