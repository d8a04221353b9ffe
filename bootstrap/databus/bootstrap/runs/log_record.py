"""The record of a log: what a hot log must know beside its frames, stored with the runs.

Clock, schemas, seeding and gaps lie in the log, which is on one machine.  The manifest names the
record that belongs to its runs, so both change in one step, and a log can be restored from them
(``processes/log_restore``).  The applier reads the schemas here.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c

from databus.bootstrap.runs.manifest import Manifest
from databus.bootstrap.runs.run_storage import Storage
from databus.common.errors import FormatError, StoreError
from databus.common.schema.source_schema import SourceSchema

PREFIX = "record-"
VERSION = 1


@dataclass(frozen=True, slots=True)
class LogRecord:
    """What a log knew when the manifest was written.

    ``log`` identifies the log; a log that was restored from the store has another one.  ``notes``
    are those of the log, by name.  ``schemas`` is the document with the schemas in the order of
    their announcement, ``schema_count`` their number.
    """

    log: str
    database: str
    clock: str
    notes: Mapping[str, Any]
    schemas: str
    schema_count: int

    def to_json(self) -> dict[str, Any]:
        """The content of its document."""
        return {
            "v": VERSION,
            "log": self.log,
            "database": self.database,
            "clock": self.clock,
            "notes": dict(self.notes),
            "schemas": self.schemas,
            "schema_count": self.schema_count,
        }


def read_record(storage: Storage, name: str) -> LogRecord:
    """The record of this name.

    Raises:
        StoreError: there is none; FormatError: it is damaged, or of another version.
    """
    document = _read(storage, name)
    try:
        if document["v"] != VERSION:
            raise FormatError(f"{name}: version {document['v']!r}, this program reads {VERSION}")
        return LogRecord(
            log=str(document["log"]),
            database=str(document["database"]),
            clock=str(document["clock"]),
            notes=dict(document["notes"]),
            schemas=str(document["schemas"]),
            schema_count=int(document["schema_count"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{storage.url}/{name}: {error!r}") from error


def write_record(storage: Storage, record: LogRecord) -> str:
    """Store a record durably under a name of its own; the name."""
    return _write(storage, record.to_json())


def read_schemas(storage: Storage, record: LogRecord) -> list[SourceSchema]:
    """The schemas of a record.

    Raises: StoreError, FormatError, as ``read_record``.
    """
    try:
        found = [SourceSchema.from_json(one) for one in _read(storage, record.schemas)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{storage.url}/{record.schemas}: {error!r}") from error
    if len(found) != record.schema_count:
        raise FormatError(
            f"{storage.url}/{record.schemas} has {len(found)} schemas, not {record.schema_count}"
        )
    return found


def write_schemas(storage: Storage, schemas: Sequence[SourceSchema]) -> str:
    """Store schemas durably; the name of their document."""
    return _write(storage, [one.to_json() for one in schemas])


def recorded_schemas(storage: Storage, manifest: Manifest) -> list[SourceSchema]:
    """The schemas by which PARTIAL frames are folded; none if they cannot be read: then such
    frames stay as they are."""
    with contextlib.suppress(StoreError, FormatError):
        if manifest.record:
            return read_schemas(storage, read_record(storage, manifest.record))
    return []


def delete_documents(storage: Storage, names: set[str]) -> None:
    """Delete documents that the manifest does not name any more, where the storage allows it."""
    with contextlib.suppress(StoreError):
        for name in names:
            storage.delete_note(name)


def _write(storage: Storage, document: Any) -> str:
    content = json.dumps(document, separators=(",", ":")).encode()
    name = f"{PREFIX}{os.urandom(4).hex()}-{google_crc32c.value(content):08x}.json"
    storage.write_note(name, content, durable=True)
    return name


def _read(storage: Storage, name: str) -> Any:
    content = storage.read_note(name)
    if content is None:
        raise StoreError(f"{storage.url}/{name} is missing, although the manifest needs it")
    if not name.endswith(f"-{google_crc32c.value(content):08x}.json"):
        raise FormatError(f"{storage.url}/{name} is damaged: its CRC is not that of its name")
    return json.loads(content)
