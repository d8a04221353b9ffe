"""Exports to S3, read back by plain pyarrow, deltalake, pyiceberg and DuckDB."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import boto3
import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from pyiceberg.catalog.glue import GlueCatalog
from typer.testing import CliRunner

from databus.cli.main import cli
from databus.client.exports.export_formats import Lake
from databus.client.exports.iceberg_table import CatalogOnS3, IcebergTable
from databus.client.exports.parquet_table import ParquetTable
from databus.client.exports.parquet_versions import S3Versions
from databus.client.exports.table_export import ExportMark, OpenTable, TableChanges
from databus.common import config as configuration
from databus.common.checkpoint import Position
from databus.common.errors import (
    BadRequest,
    BucketError,
    ConfigError,
    ServerUnavailable,
    StoreBusy,
    StoreError,
)
from databus.common.storage.bucket import Bucket, open_bucket
from tests.support.exports import EXPORT, FORMATS, OnS3, assert_equal, export, exported
from tests.support.s3_server import ACCESS_KEY, S3Server
from tests.support.system import System
from tests.support.tables import name_of, source_rows, sqlite_system, write
from tests.support.waiting import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMMITS = {
    "parquet": "main.orders/current/files.txt",
    "delta": "main.orders/_delta_log/",
    "iceberg": "shop/catalog.db",
}
"""The object whose write is the commit."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One system over an SQLite file for all tests of this file."""
    with sqlite_system(tmp_path_factory.mktemp("export-s3")) as found:
        yield found


def section(server: S3Server, name: str, **changes: object) -> str:
    """How the server is reached, as a section of the file."""
    options = server.options(**{"attempts": 3, **changes})
    settings = {
        key: getattr(options, key) for key in ("endpoint", "region", "access_key", "attempts")
    }
    settings["secret_key"] = options.secret_key.get_secret_value()
    return f"[{name}]\n" + "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in settings.items()
    )


@pytest.fixture
def on_s3(system: System, s3: S3Server, tmp_path: Path) -> Callable[..., OnS3]:
    """Makes an empty prefix on S3, with more configuration."""

    def make(more: str) -> OnS3:
        file = tmp_path / "s3.toml"
        file.write_text(system.config.read_text() + more)
        return OnS3(s3, s3.empty_prefix(), file, tmp_path)

    return make


@pytest.fixture
def store(on_s3: Callable[..., OnS3], s3: S3Server) -> OnS3:
    """An empty prefix, reached by [export.s3]."""
    return on_s3(section(s3, "export.s3"))


def from_environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it caches the credentials
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-a-secret")
    return ""


@pytest.mark.parametrize(
    ("form", "credentials"), [("parquet", "bootstrap.s3"), ("delta", ""), ("iceberg", "")]
)
def test_an_export_is_the_source_and_the_next_one_writes_what_changed(
    system: System,
    s3: S3Server,
    on_s3: Callable[..., OnS3],
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    credentials: str,
) -> None:
    to = on_s3(section(s3, credentials) if credentials else from_environment(s3, monkeypatch))
    with closing(system.shop.connect()) as connection:
        connection.execute("INSERT INTO stock (sku, on_hand) VALUES ('NEW', 1)")
    write(system, 20)
    assert export(system, form, to) == ["whole"] * 4
    assert_equal(system, form, to)
    assert export(system, form, to) == ["nothing"] * 4
    with closing(system.shop.connect()) as connection:
        connection.execute("DELETE FROM stock WHERE sku = 'NEW'")
    write(system, 30)
    assert set(export(system, form, to)) == {"changes"}
    assert_equal(system, form, to)
    assert ("NEW",) not in exported(system, form, to, "stock")
    assert export(system, form, to, "--since", "0", "--source", "*.stock") == ["whole"]
    assert exported(system, form, to, "stock") == source_rows(system, "stock")


def test_duckdb_reads_the_files_of_the_list_and_old_ones_go(system: System, store: OnS3) -> None:
    name = name_of(system, "orders")
    expected: dict[Any, str] = {}
    lists = []
    for _ in range(3):
        write(system, 10)
        export(system, "parquet", store, "--source", "*.orders")
        lists.append(store.files(name))
        files = ds.dataset(lists[-1], filesystem=store.filesystem)
        found = duckdb.from_arrow(files).select("id", "state").fetchall()
        expected = {key: row["state"] for (key,), row in source_rows(system, "orders").items()}
        assert dict(found) == expected
    bucket, prefix = open_bucket(store.url, store.server.options())
    folder = f"{prefix}shop/{name}/data/"
    retained = {f"{bucket.name}/{folder}{one}" for one in bucket.keys(folder)}
    assert retained == {*lists[-1], *lists[-2]}, (
        "readers of the last list but one are not disturbed"
    )
    assert not retained >= {*lists[0]}


KILLED = """
import os, signal, sys
from pathlib import Path
from databus.cli.commands import export_command
from databus.client.exports import delta_table as delta, iceberg_table, parquet_table
from databus.common.storage import bucket

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[2] == "delta":
    init = delta.DeltaLakeTable.__init__
    def reaching(self, *args, **kwargs):
        init(self, *args, reached=die, **kwargs)
    delta.DeltaLakeTable.__init__ = reaching
bucket.Bucket.commit = die
"""


@pytest.mark.faults
@pytest.mark.parametrize("form", FORMATS)
def test_one_that_is_killed_before_its_commit_leaves_the_old_state_and_is_made_up_for(
    system: System, store: OnS3, form: str
) -> None:
    write(system, 10)
    export(system, form, store, "--source", "*.orders")
    before = exported(system, form, store, "orders")
    write(system, 20)
    command = [sys.executable, "-c", KILLED + EXPORT, str(store.config), form, store.url]
    done = subprocess.run(command, capture_output=True, timeout=120 * PATIENCE, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert exported(system, form, store, "orders") == before
    assert export(system, form, store, "--source", "*.orders") == ["changes"]
    assert exported(system, form, store, "orders") == source_rows(system, "orders")


@pytest.mark.faults
@pytest.mark.parametrize("form", FORMATS)
def test_a_commit_that_is_refused_changes_nothing_and_one_whose_answer_is_lost_counts(
    system: System, store: OnS3, form: str
) -> None:
    faults = store.server.faults
    write(system, 10)
    export(system, form, store, "--source", "*.orders")
    before = exported(system, form, store, "orders")
    write(system, 10)
    faults.refused_writes = (COMMITS[form],)
    with pytest.raises(StoreError, match=r"^s3://.*orders.*503|^s3://.*SlowDown") as refused:
        export(system, form, store, "--source", "*.orders")
    assert isinstance(refused.value, BucketError), "its hint is about S3"
    assert "\n" not in refused.value.message and "\x1b" not in refused.value.message
    faults.refused_writes = ()
    assert exported(system, form, store, "orders") == before

    faults.lost_writes.append(COMMITS[form])
    if form == "delta":  # its library takes it for another's commit; the next export finds it
        with pytest.raises(StoreError, match=r"main\.orders: "):
            export(system, form, store, "--source", "*.orders")
    else:
        assert export(system, form, store, "--source", "*.orders") == ["changes"]
    assert faults.lost_writes == []
    assert exported(system, form, store, "orders") == source_rows(system, "orders")
    assert export(system, form, store, "--source", "*.orders") == ["nothing"]


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


def tables_of(form: str, bucket: Bucket, prefix: str) -> Callable[..., OpenTable]:
    """What opens one table as another export would."""

    def parquet(**more: Any) -> OpenTable:
        return ParquetTable(S3Versions(bucket, f"{prefix}t/"), ["id"], **more)

    def iceberg(**more: Any) -> OpenTable:
        shared = CatalogOnS3(bucket, prefix)
        return IcebergTable(shared.catalog, ("main", "t"), ["id"], shared.publish, **more)

    return parquet if form == "parquet" else iceberg


@pytest.mark.parametrize("form", ["parquet", "iceberg"])
def test_of_two_exports_at_once_the_second_is_refused_and_harms_nothing(
    s3: S3Server, form: str
) -> None:
    bucket, prefix = open_bucket(s3.empty_prefix(), s3.options())
    opened = tables_of(form, bucket, prefix)

    def put(table: OpenTable, scn: int, *ids: int) -> None:
        table.replace(
            rows().schema, iter(rows(*ids).to_batches()), ExportMark("c", Position(scn, 0))
        )

    def other(_: str) -> None:
        changes = TableChanges(rows(4), rows(1))
        opened().apply(rows().schema, changes, ExportMark("c", Position(3, 0)))

    put(opened(), 1, 1, 2)
    with pytest.raises(StoreBusy, match="run it again"):
        put(opened(reached=other), 2, 7)
    table = opened()
    assert table.mark() == ExportMark("c", Position(3, 0))
    found = table.rows_of(rows(1, 2, 4, 7))
    assert sorted(row["id"] for row in found) == [2, 4]


def test_a_catalog_of_the_users_gets_the_tables(
    system: System, on_s3: Callable[..., OnS3], s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    glue = {
        "type": "glue",
        "glue.endpoint": s3.url,
        "glue.region": "us-east-1",
        "glue.access-key-id": ACCESS_KEY,
        "glue.secret-access-key": "env:GLUE_SECRET",
    }
    monkeypatch.setenv("GLUE_SECRET", "not-a-secret")
    properties = "".join(f'"{name}" = "{value}"\n' for name, value in glue.items())
    to = on_s3(f"{section(s3, 'export.s3')}[export.catalog]\n{properties}")
    reader = GlueCatalog("mine", **{**glue, "glue.secret-access-key": "x"}, **to.properties)
    for expected in ("whole", "changes"):
        write(system, 10)
        assert export(system, "iceberg", to, "--source", "*.orders") == [expected]
        found = reader.load_table("shop_main.orders").scan(selected_fields=("id",)).to_arrow()
        assert {(key,) for key in found["id"].to_pylist()} == set(source_rows(system, "orders"))


def test_an_unusable_export_target_is_reported_in_one_line(
    system: System, s3: S3Server, on_s3: Callable[..., OnS3], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(to: str, more: str) -> str:
        arguments = ["export", "-c", str(on_s3(more).config), "--to", to]
        found = CliRunner().invoke(cli, arguments).exception
        assert isinstance(found, ConfigError | BadRequest | ServerUnavailable)
        assert "\n" not in found.message
        return found.message

    reached = section(s3, "export.s3")
    assert "there is no bucket 'nowhere' at http" in refused("s3://nowhere/lake", reached)
    stranger = section(s3, "export.s3", access_key="stranger")
    assert "refuses the credentials: InvalidAccessKeyId" in refused(s3.empty_prefix(), stranger)
    assert "--to is a folder or s3://" in refused("gs://bucket/lake", reached)
    assert "did you mean endpoint?" in refused(
        s3.empty_prefix(), reached.replace("endpoint", "endpont")
    )
    no_server = section(s3, "export.s3", endpoint="http://127.0.0.1:9", attempts=1)
    assert "Could not connect to the endpoint" in refused(s3.empty_prefix(), no_server)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(system.folder / "none"))
    anonymous = f'[export.s3]\nendpoint = "{s3.url}"\nregion = "us-east-1"\n'
    assert "there are no credentials for S3" in refused(s3.empty_prefix(), anonymous)


def test_a_catalog_that_cannot_be_opened_is_reported_without_its_secrets(tmp_path: Path) -> None:
    for uri in ("none://me:secret@host", "sqlite:////nowhere/secret.db"):
        found = configuration.parse(f'[export.catalog]\nuri = "{uri}"\n')
        assert "secret" not in repr(found)
        lake = Lake("iceberg", str(tmp_path), found)
        with pytest.raises(ConfigError, match=r"\[export\.catalog\]: ") as refused:
            lake.table("shop", "main.orders", "c")(["id"])
        assert "secret" not in refused.value.message
