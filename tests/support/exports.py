"""`databus export` of a system's tables, and what the formats' own readers find there."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyarrow.fs import S3FileSystem
from pyiceberg.catalog.sql import SqlCatalog
from typer.testing import CliRunner

from databus.cli.demo.shop import TABLES, Rows
from databus.cli.main import cli
from databus.client.exports.iceberg_table import open_catalog
from tests.support.s3_server import S3Server
from tests.support.system import System
from tests.support.tables import keyed, name_of, source_rows

FORMATS = ("parquet", "delta", "iceberg")
EXPORT = """
export_command.export(
    Path(sys.argv[1]), form=sys.argv[2], source="*.orders", to=sys.argv[3], since="auto",
    bootstrap=None,
)
"""
"""The end of a program that exports the orders: the configuration, the format and the target."""


@dataclass(frozen=True)
class OnS3:
    """A prefix on S3, with the file that says how it is reached, and a folder for its catalog."""

    server: S3Server
    url: str
    config: Path
    folder: Path

    @property
    def filesystem(self) -> S3FileSystem:
        """Arrow's own."""
        options = self.server.options()
        return S3FileSystem(
            access_key=options.access_key,
            secret_key=options.secret_key.get_secret_value(),
            endpoint_override=self.server.url,
            region=options.region,
        )

    def files(self, table: str) -> list[str]:
        """What the list of a Parquet table names, without the scheme."""
        name = f"{self.url.removeprefix('s3://')}/shop/{table}/current/files.txt"
        with self.filesystem.open_input_file(name) as file:
            return [line.removeprefix("s3://") for line in file.read().decode().splitlines()]

    def delta(self, table: str) -> DeltaTable:
        """The table as deltalake opens it."""
        options = self.server.options()
        settings = {
            "aws_endpoint_url": self.server.url,
            "aws_allow_http": "true",
            "aws_region": options.region,
            "aws_access_key_id": options.access_key,
            "aws_secret_access_key": options.secret_key.get_secret_value(),
        }
        return DeltaTable(f"{self.url}/shop/{table}", storage_options=settings)

    @property
    def properties(self) -> dict[str, str]:
        """What pyiceberg has to know of the server."""
        options = self.server.options()
        return {
            "s3.endpoint": self.server.url,
            "s3.region": options.region,
            "s3.access-key-id": options.access_key,
            "s3.secret-access-key": options.secret_key.get_secret_value(),
        }

    def catalog(self) -> SqlCatalog:
        """The Iceberg catalog, opened from a fetched copy of its file."""
        file = self.folder / "catalog.db"
        with self.filesystem.open_input_file(
            f"{self.url.removeprefix('s3://')}/shop/catalog.db"
        ) as found:
            file.write_bytes(found.read())
        return SqlCatalog("databus", uri=f"sqlite:///{file}", **self.properties)


def export(system: System, form: str, to: Path | OnS3, *more: str) -> list[str]:
    """What it did with each table: `whole`, `changes` or `nothing`."""
    config = to.config if isinstance(to, OnS3) else system.config
    target = to.url if isinstance(to, OnS3) else str(to)
    arguments = ["export", "-c", str(config), "--format", form, "--to", target, *more]
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return [line.split(": ")[1].split(",")[0] for line in done.output.splitlines()]


def table_of(system: System, form: str, to: Path | OnS3, table: str) -> Any:
    """The exported table as its own reader gives it, in Arrow."""
    if isinstance(to, OnS3):
        return _table_on_s3(form, to, name_of(system, table))
    folder = to / "shop" / name_of(system, table)
    if form == "parquet":
        return pq.read_table(folder / "current")
    if form == "delta":
        return DeltaTable(str(folder)).to_pyarrow_table()
    catalog = open_catalog(to / "shop")
    with closing(catalog.engine) if hasattr(catalog.engine, "close") else closing(catalog):
        return catalog.load_table(name_of(system, table)).scan().to_arrow()


def _table_on_s3(form: str, to: OnS3, name: str) -> Any:
    if form == "parquet":
        return pq.ParquetDataset(to.files(name), filesystem=to.filesystem).read()
    if form == "delta":
        return to.delta(name).to_pyarrow_table()
    with closing(to.catalog()) as catalog:
        return catalog.load_table(name).scan().to_arrow()


def exported(system: System, form: str, to: Path | OnS3, table: str) -> Rows:
    """The exported rows by key."""
    rows = table_of(system, form, to, table).to_pylist()
    found = keyed(rows, TABLES[table])
    assert len(found) == len(rows), "a key came twice"
    return found


def assert_equal(system: System, form: str, to: Path | OnS3) -> None:
    """Hold every exported table against the source's."""
    for table in TABLES:
        assert exported(system, form, to, table) == source_rows(system, table)
