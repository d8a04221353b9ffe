"""The files of a table in Apache Iceberg, committed by ``pyiceberg``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyiceberg.catalog import Catalog
from pyiceberg.conversions import from_bytes
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchTableError,
    ValidationException,
)
from pyiceberg.io.pyarrow import parquet_files_to_data_files
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform

from databus.client.exports.iceberg_table import IcebergTable, mark_properties, reshape
from databus.client.exports.lake_files import (
    FileCommit,
    FilePlace,
    LakeFile,
    Layout,
    NewFile,
    other_rows,
)
from databus.client.exports.table_export import ExportMark
from databus.common.errors import StoreBusy


class IcebergFiles:
    """One Iceberg table, in any catalog.

    Invariants:
        I1. Columns, files and position change in one commit of the catalog.  The position is in
            the table's properties and in the snapshot's summary.

    Owner: one mirror; the catalog refuses the commit of a second one.
    """

    def __init__(
        self,
        catalog: Catalog,
        name: tuple[str, ...],
        key: Sequence[str],
        layout: Layout,
        publish: Callable[[], None] = lambda: None,
        s3: Mapping[str, Any] | None = None,
    ) -> None:
        self._table = IcebergTable(catalog, name, key)
        self._catalog = catalog
        self._name = name
        self._key = key[0]
        self._layout = layout
        self._publish = publish
        self._s3 = s3

    def _open(self) -> Table | None:
        try:
            return self._catalog.load_table(self._name)
        except NoSuchTableError:
            return None

    def mark(self) -> ExportMark | None:
        """The table's position."""
        found = self._table.mark()
        table = self._open() if found is None else None
        if table is not None and table.current_snapshot() is not None:
            raise other_rows(f"the Iceberg table {'.'.join(self._name)}")
        return found

    def schema(self) -> Any:
        """Its schema."""
        return self._table.schema()

    def files(self) -> list[LakeFile]:
        """The present files."""
        table = self._open()
        if table is None:
            return []
        key = table.schema().find_field(self._key)
        root = f"{table.location()}/"
        return [
            LakeFile(
                task.file.file_path.removeprefix(root),
                task.file.record_count,
                low=_bound(task.file.lower_bounds, key),
                high=_bound(task.file.upper_bounds, key),
            )
            for task in table.scan().plan_files()
        ]

    def begin(self, schema: Any, *, whole: bool) -> FileCommit:
        """Prepare a commit."""
        table = self._open()
        if table is None:
            with contextlib.suppress(NamespaceAlreadyExistsError):
                self._catalog.create_namespace(self._name[:-1])
            beginning: Any = self._catalog.create_table_transaction(
                self._name, schema=schema, properties={"format-version": "2"}
            )
            if self._layout.partition_by:
                with beginning.update_spec() as update:
                    for name in self._layout.partition_by:
                        update.add_field(name, IdentityTransform(), name)
        else:
            beginning = table.transaction()
            if whole:
                reshape(beginning, table, schema)
            elif set(schema.names) - set(self.schema().names):
                with beginning.update_schema() as update:
                    update.union_by_name(schema)
        return _IcebergCommit(beginning, table, schema, self._publish, self._s3)


class _IcebergCommit:
    def __init__(
        self,
        transaction: Any,
        table: Table | None,
        schema: Any,
        publish: Callable[[], None],
        s3: Mapping[str, Any] | None,
    ) -> None:
        self._transaction = transaction
        self._table = table
        self._publish = publish
        metadata = transaction.table_metadata
        root = metadata.location.removeprefix("s3://").removeprefix("file://")
        self._scheme = metadata.location.removesuffix(root)
        ids = {one.name: one.field_id for one in metadata.schema().fields}
        self.place = FilePlace(root, schema, s3, "data/", ids, _partition_names(metadata))

    def commit(
        self, removed: Sequence[LakeFile] | None, added: Sequence[NewFile], mark: ExportMark
    ) -> None:
        transaction, properties = self._transaction, mark_properties(mark)
        paths = [f"{self._scheme}{self.place.root}/{one.path}" for one in added]
        gone = None if removed is None else {one.path for one in removed}
        before = (
            [] if self._table is None else [one.file for one in self._table.scan().plan_files()]
        )
        io = transaction._table.io
        try:
            with transaction.update_snapshot(snapshot_properties=properties).overwrite() as files:
                for file in before:
                    if gone is None or self._relative(file.file_path) in gone:
                        files.delete_data_file(file)
                for file in parquet_files_to_data_files(
                    io, transaction.table_metadata, iter(paths)
                ):
                    files.append_data_file(file)
            transaction.set_properties(properties)
            transaction.commit_transaction()
        except (CommitFailedException, ValidationException) as error:
            raise StoreBusy(f"another writer has changed the table meanwhile: {error}") from error
        self._publish()

    def _relative(self, path: str) -> str:
        return path.removeprefix(self._scheme).removeprefix(f"{self.place.root}/")


def _partition_names(metadata: Any) -> tuple[str, ...]:
    schema = metadata.schema()
    return tuple(str(schema.find_column_name(one.source_id)) for one in metadata.spec().fields)


def _bound(bounds: Mapping[int, bytes] | None, column: Any) -> Any:
    """A bound of a column in a file; a text's may be shorter than its values."""
    found = (bounds or {}).get(column.field_id)
    return None if found is None else from_bytes(column.field_type, found)
