"""Which definition of each table the stream has told last, kept over restarts.

A schema-change frame is due when a statement has made a table another one than consumers know.
What they know is not what the server's catalogue has when the stream begins again: it may have
been changed while nobody read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from databus.common.schema.source_schema import SourceSchema


class AnnouncedSchemas:
    """Fingerprints by source.

    Invariants:
        I1. What was kept of an earlier stream is not overridden by what is assumed.

    Owner: the stream's decoder.
    """

    def __init__(self, kept: str = "") -> None:
        """``kept`` is what ``encode`` gave, or "".

        Raises:
            ValueError: it is something else.
        """
        found = json.loads(kept) if kept else {}
        self._announced = {
            str(source): int(fingerprint, 16) for source, fingerprint in found.items()
        }
        self._encoded: str | None = kept
        self._schemas: dict[str, SourceSchema] = {}

    @property
    def sources(self) -> Iterable[str]:
        """The tables of which a definition was told."""
        return self._announced.keys()

    def schema(self, source: str) -> SourceSchema | None:
        """The definition that was told last; None where only its fingerprint is known."""
        found = self._schemas.get(source)
        known = found is not None and found.fingerprint == self._announced.get(source)
        return found if known else None

    def schemas(self) -> dict[str, SourceSchema]:
        """All definitions that were told last, as far as they are known."""
        found = ((source, self.schema(source)) for source in self._announced)
        return {source: schema for source, schema in found if schema is not None}

    def forget_schema(self, source: str) -> None:
        """No row is there any more that has the definition which was told last."""
        self._schemas.pop(source, None)

    def get(self, source: str) -> int | None:
        """The fingerprint that was told last."""
        return self._announced.get(source)

    def put(self, schema: SourceSchema) -> None:
        """Consumers know this one from here on."""
        self._schemas[schema.source] = schema
        if self._announced.get(schema.source) != schema.fingerprint:
            self._announced[schema.source] = schema.fingerprint
            self._encoded = None

    def assume(self, schemas: Iterable[SourceSchema]) -> None:
        """For tables of which nothing was kept: they are known as they are now."""
        for schema in schemas:
            if self._announced.get(schema.source, schema.fingerprint) == schema.fingerprint:
                self.put(schema)

    def encode(self) -> str:
        """As JSON, to be kept; "" if there is nothing."""
        if self._encoded is None:
            self._encoded = json.dumps({name: f"{fp:x}" for name, fp in self._announced.items()})
        return self._encoded
