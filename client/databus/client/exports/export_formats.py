"""Opens the tables of each format at their locations: in a folder, or on S3.

A table of a database is ``<to>/<database>/<schema.table>``, with Iceberg the table of that name
in the catalog of ``<to>/<database>``, or ``<database>_<schema>.<table>`` in one of the user's.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from databus.client.exports.lake_files import FileTable, Layout
from databus.client.exports.table_export import OpenTable
from databus.common.config import Config
from databus.common.errors import BadRequest, BucketError, ConfigError, StoreError
from databus.common.schema.source_names import split_source
from databus.common.storage.bucket import open_bucket

FORMATS = ("parquet", "delta", "iceberg")


class Lake:
    """All tables of a format at one location, ``DIR`` or ``s3://bucket/prefix``.

    Raises:
        BadRequest: the location is of another form.
        ConfigError: the bucket does not exist, or refuses the credentials.
        MissingDependency: boto3 is not installed.
    """

    def __init__(self, form: str, to: str, config: Config) -> None:
        self._form, self._to = form, to
        self._catalog = {name: text.reveal for name, text in config.export.catalog.items()}
        self._catalogs: dict[str, Any] = {}
        self._bucket = None
        self._errors: tuple[type[Exception], ...] = _errors(form)
        if "://" not in to:
            return
        try:
            self._bucket, self._prefix = open_bucket(to, config.export_s3)
        except ConfigError as error:
            raise BadRequest(f"--to is a folder or s3://bucket/prefix: {error.message}") from error
        self._bucket.check(self._prefix)

    def table(self, database: str, source: str, clock: str) -> Callable[[Sequence[str]], OpenTable]:
        """A function that opens a table, given its key."""
        if self._form == "parquet":
            return lambda key: self._parquet(f"{database}/{source}", key)
        if self._form == "delta":
            return lambda key: self._delta(f"{database}/{source}", key, clock)
        return lambda key: self._iceberg(database, source, key)

    def files(self, database: str, source: str, clock: str) -> Callable[..., FileTable]:
        """A function that opens a table as files, given its key and its layout; not Parquet."""
        open_table = self._delta_files if self._form == "delta" else self._iceberg_files
        return lambda key, layout: open_table(database, source, clock, key, layout)

    @property
    def is_sequential(self) -> bool:
        """Whether tables share a catalog in one SQLite file: one of them is written at a time."""
        return self._form == "iceberg" and not self._catalog

    def _delta_files(
        self, database: str, source: str, clock: str, key: Sequence[str], layout: Layout
    ) -> FileTable:
        from databus.client.exports.delta_files import DeltaFiles
        from databus.client.exports.delta_table import options_of

        location, bucket = self._location(database, source), self._bucket
        if bucket is None:
            return DeltaFiles(location, key, clock, layout)
        return DeltaFiles(location, key, clock, layout, options_of(bucket), bucket.settings)

    def _iceberg_files(
        self, database: str, source: str, clock: str, key: Sequence[str], layout: Layout
    ) -> FileTable:
        from databus.client.exports.iceberg_files import IcebergFiles

        catalog, name, publish = self._iceberg_place(database, source)
        s3 = None if self._bucket is None else self._bucket.settings
        return IcebergFiles(catalog, name, key, layout, publish, s3)

    def _parquet(self, name: str, key: Sequence[str]) -> OpenTable:
        from databus.client.exports.parquet_table import ParquetTable
        from databus.client.exports.parquet_versions import LocalVersions, S3Versions, Versions

        versions: Versions = LocalVersions(Path(self._to) / name)
        if self._bucket is not None:
            versions = S3Versions(self._bucket, f"{self._prefix}{name}/")
        return ParquetTable(versions, key)

    def _delta(self, name: str, key: Sequence[str], clock: str) -> OpenTable:
        from databus.client.exports.delta_table import DeltaLakeTable, options_of

        if self._bucket is None:
            return DeltaLakeTable(self._location(name), key, clock)
        return DeltaLakeTable(self._location(name), key, clock, options_of(self._bucket))

    def _location(self, *names: str) -> str:
        """A folder, or an URL of S3."""
        if self._bucket is None:
            return str(Path(self._to, *names))
        return f"s3://{self._bucket.name}/{self._prefix}{'/'.join(names)}"

    def _iceberg(self, database: str, source: str, key: Sequence[str]) -> OpenTable:
        from databus.client.exports.iceberg_table import IcebergTable

        catalog, name, publish = self._iceberg_place(database, source)
        return IcebergTable(catalog, name, key, publish)

    def _iceberg_place(
        self, database: str, source: str
    ) -> tuple[Any, tuple[str, ...], Callable[[], None]]:
        """A table's catalog, its name there, and what publishes a commit."""
        from databus.client.exports.iceberg_table import CatalogOnS3, load_own, open_catalog

        parts = tuple(part for part in split_source(source) if part)
        if self._bucket is not None and not self._catalog:  # read again for each commit
            shared = CatalogOnS3(self._bucket, f"{self._prefix}{database}/")
            return shared.catalog, parts, shared.publish
        if database not in self._catalogs:
            self._catalogs[database] = (
                load_own(self._warehouse_properties(database) | self._catalog)
                if self._catalog
                else open_catalog(Path(self._to) / database)
            )
        if self._catalog:
            parts = ("_".join((database, *parts[:-1])), parts[-1])
        return self._catalogs[database], parts, lambda: None

    def _warehouse_properties(self, database: str) -> dict[str, str]:
        """The location as properties of the user's catalog."""
        if self._bucket is None:
            return {"warehouse": (Path(self._to) / database).resolve().as_uri()}
        from databus.client.exports.iceberg_table import properties_of

        warehouse = f"s3://{self._bucket.name}/{self._prefix}{database}"
        return {"warehouse": warehouse, **properties_of(self._bucket)}

    @contextlib.contextmanager
    def writing(self, database: str, source: str) -> Iterator[None]:
        """Convert the errors of the format's library in this block, adding the table's name.

        Raises:
            BucketError, StoreError: the library raised an error, on S3 or in a folder.
        """
        try:
            yield
        except self._errors as error:
            refusal = StoreError if self._bucket is None else BucketError
            raise refusal(f"{self._to}/{database}/{source}: {_in_a_line(error)}") from error


def _errors(form: str) -> tuple[type[Exception], ...]:
    module: Any
    if form == "parquet":
        from databus.client.exports import parquet_table as module
    elif form == "delta":
        from databus.client.exports import delta_table as module
    else:
        from databus.client.exports import iceberg_table as module
    found: tuple[type[Exception], ...] = module.ERRORS
    return found


def _in_a_line(error: Exception) -> str:
    """The message without the colours and the tree characters of deltalake."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).replace("↳", " ")
    return " ".join(plain.split())[:600] or repr(error)
