"""The schemas that a store's frames were written with, as a note for the applier.

The hot log has them, and the applier may run on another machine.  Without the note, or with one
that a power loss has torn, PARTIAL frames stay as they are: no data depends on it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable

from databus.bootstrap.runs.run_storage import Storage
from databus.common.errors import FormatError, StoreError
from databus.common.schema.source_schema import SourceSchema

NOTE = "schemas.json"


def note_schemas(storage: Storage, schemas: Iterable[SourceSchema]) -> None:
    """Store the schemas in the order of their announcement, if they are not there yet."""
    content = json.dumps([one.to_json() for one in schemas], separators=(",", ":")).encode()
    with contextlib.suppress(StoreError):
        if storage.read_note(NOTE) != content:
            storage.write_note(NOTE, content)


def noted_schemas(storage: Storage) -> list[SourceSchema]:
    """The schemas that were stored last; none if the note is missing or torn."""
    try:
        return [SourceSchema.from_json(one) for one in json.loads(storage.read_note(NOTE) or b"[]")]
    except (FormatError, ValueError, TypeError, AttributeError):
        return []
