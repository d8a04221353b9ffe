"""A table in Apache Iceberg, written by ``pyiceberg``; the mark is in the table's properties.

The catalog is an SQLite file, ``<to>/catalog.db``, in the form that every Iceberg client with an
SQL catalog reads; on S3 that file is an object, which each commit replaces.  Or it is the user's
own catalog, of any kind that ``pyiceberg`` supports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchTableError,
)
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.table.upsert_util import create_match_filter
from sqlalchemy.exc import SQLAlchemyError

from databus.client.exports.table_export import ExportMark, TableChanges
from databus.common.checkpoint import Position
from databus.common.errors import ConfigError, StoreBusy
from databus.common.storage.bucket import Bucket

APPEND_ROWS = 1_000_000
"""Rows of one data file, and most rows in memory."""


ERRORS = (OSError, CommitFailedException)
"""Errors of reading and writing, besides ours."""

CATALOG_NAME = "catalog.db"
_SHOWN = ("type", "warehouse")
"""The properties of a catalog that messages may contain."""


def open_catalog(folder: Path) -> SqlCatalog:
    """The catalog of a folder; made if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    return SqlCatalog(
        "databus", uri=f"sqlite:///{folder}/{CATALOG_NAME}", warehouse=folder.resolve().as_uri()
    )


def load_own(properties: Mapping[str, str]) -> Catalog:
    """The user's own catalog, by ``pyiceberg``'s properties.

    Raises:
        ConfigError: they are incomplete or wrong, or the catalog does not answer.
    """
    try:
        return load_catalog("databus", **properties)
    except (ValueError, KeyError, ImportError, OSError, SQLAlchemyError) as error:
        reason = (str(error).splitlines() or [repr(error)])[0]
        for name, value in properties.items():
            if name not in _SHOWN:
                reason = reason.replace(value, "***")
        raise ConfigError(f"[export.catalog]: {reason}") from error


def properties_of(bucket: Bucket) -> dict[str, str]:
    """A bucket as properties of ``pyiceberg``."""
    settings, endpoint = bucket.settings, bucket.endpoint
    given = {
        "s3.endpoint": endpoint,
        # Without a region, pyiceberg requests the bucket's from Amazon, whatever the endpoint is.
        "s3.region": bucket.region or ("us-east-1" if endpoint else ""),
        "s3.access-key-id": settings.get("access_key"),
        "s3.secret-access-key": settings.get("secret_key"),
        "s3.session-token": settings.get("session_token"),
        "s3.connect-timeout": f"{settings['connect_timeout']:g}",
        "s3.request-timeout": f"{settings['request_timeout']:g}",
    }
    return {name: value for name, value in given.items() if value}


class CatalogOnS3:
    """The SQLite file as an object: read into memory, and written back after a commit.

    Invariants:
        I1. The object is replaced only if it is still the one that was read.  So other clients
            see all of a commit, or nothing of it.

    Owner: one export; ``publish`` fails if another one commits in between.
    """

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket, self._key = bucket, prefix + CATALOG_NAME
        warehouse = f"s3://{bucket.name}/{prefix}".rstrip("/")
        self.catalog = SqlCatalog(
            "databus", uri="sqlite://", warehouse=warehouse, **properties_of(bucket)
        )
        found = bucket.get(self._key)
        self._tag = found.tag if found else None
        if found is not None:
            self._database().deserialize(found.content)

    def _database(self) -> Any:
        """The ``sqlite3`` connection: each thread has one, and its database ends with it."""
        with self.catalog.engine.connect() as connection:
            return connection.connection.driver_connection

    def publish(self) -> None:
        """Write it back.

        Raises:
            StoreBusy: another export has written it.
        """
        written = self._bucket.commit(self._key, bytes(self._database().serialize()), self._tag)
        if written is None:
            raise StoreBusy(
                f"another export has written s3://{self._bucket.name}/{self._key} since this one "
                "began; there can be only one at a time: run it again"
            )
        self._tag = written


class IcebergTable:
    """One table.

    Invariants:
        I1. Rows and position change in one commit of the catalog.  ``publish`` follows it, if
            other clients do not see the commit by itself.

    Owner: one export at a time; the catalog refuses the commit if another one wrote in between.
    """

    def __init__(
        self,
        catalog: Catalog,
        name: tuple[str, ...],
        key: Sequence[str],
        publish: Callable[[], None] = lambda: None,
        reached: Callable[[str], None] = lambda step: None,
    ) -> None:
        self._catalog = catalog
        self._publish = publish
        self._name = name
        self._key = list(key)
        self._reached = reached

    def _table(self) -> Any:
        try:
            return self._catalog.load_table(self._name)
        except NoSuchTableError:
            return None

    def mark(self) -> ExportMark | None:
        """The table's position."""
        table = self._table()
        if table is None or "databus.clock" not in table.properties:
            return None
        found = table.properties
        position = Position(int(found["databus.scn"]), int(found["databus.seq"]))
        return ExportMark(found["databus.clock"], position)

    def schema(self) -> Any:
        """Its schema, in the types of our rows."""
        found = self._table().schema().as_arrow()
        return pa.schema([(field.name, _ours(field.type)) for field in found])

    def rows_of(self, keys: Any) -> list[Mapping[str, Any]]:
        """The rows with these keys."""
        found = self._table().scan(row_filter=create_match_filter(keys, self._key))
        return list(found.to_arrow().to_pylist())

    def replace(self, schema: Any, batches: Iterator[Any], mark: ExportMark) -> int:
        """One commit that deletes everything and appends these rows."""
        table = self._table()
        if table is None:
            with contextlib.suppress(NamespaceAlreadyExistsError):
                self._catalog.create_namespace(self._name[:-1])
            beginning = self._catalog.create_table_transaction(self._name, schema=schema)
        else:
            beginning = table.transaction()
        count = 0
        with beginning as transaction:
            if table is not None:
                transaction.delete(AlwaysTrue())
                reshape(transaction, table, schema)
            for rows in _chunks(schema, batches):
                transaction.append(rows)
                count += rows.num_rows
            transaction.set_properties(mark_properties(mark))
            self._reached("written")
        self._reached("committed")
        self._publish()
        return count

    def apply(self, schema: Any, changes: TableChanges, mark: ExportMark) -> None:
        """One commit that deletes all changed keys and appends their rows."""
        table = self._table()
        with table.transaction() as transaction:
            if set(schema.names) - set(self.schema().names):
                with transaction.update_schema() as update:
                    update.union_by_name(schema)
            keys = changes.keys
            transaction.delete(create_match_filter(keys, self._key))
            if changes.rows.num_rows:
                transaction.append(changes.rows.select(schema.names))
            transaction.set_properties(mark_properties(mark))
            self._reached("written")
        self._reached("committed")
        self._publish()


def reshape(transaction: Any, table: Any, schema: Any) -> None:
    """Make the columns those of ``schema``: a missing one or one of another type is dropped."""
    had = {field.name: _ours(field.type) for field in table.schema().as_arrow()}
    dropped = [n for n, t in had.items() if n not in schema.names or schema.field(n).type != t]
    if dropped:
        with transaction.update_schema(allow_incompatible_changes=True) as update:
            for name in dropped:
                update.delete_column(name)
    with transaction.update_schema() as update:
        update.union_by_name(schema)


def _ours(type_: Any) -> Any:
    """Iceberg gives texts and bytes with 64-bit offsets; ours have 32."""
    if pa.types.is_large_string(type_):
        return pa.string()
    return pa.binary() if pa.types.is_large_binary(type_) else type_


def mark_properties(mark: ExportMark) -> dict[str, str]:
    """A mark as properties of a table, or of a snapshot."""
    return {
        "databus.clock": mark.clock,
        "databus.scn": str(mark.position.scn),
        "databus.seq": str(mark.position.seq),
    }


def _chunks(schema: Any, batches: Iterator[Any]) -> Iterator[Any]:
    held: list[Any] = []
    for batch in batches:
        held.append(batch)
        if sum(one.num_rows for one in held) >= APPEND_ROWS:
            yield pa.Table.from_batches(held, schema=schema)
            held = []
    if held:
        yield pa.Table.from_batches(held, schema=schema)
