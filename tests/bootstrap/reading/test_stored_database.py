"""A database in the server: its documents are parsed once, and again when they have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from databus.bootstrap.log import hot_log
from databus.bootstrap.reading.stored_database import StoredDatabase
from databus.bootstrap.runs.manifest import Manifest
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from tests.bootstrap.bench import SCHEMA, Bench
from tests.bootstrap.model import SOURCES

OTHER = SourceSchema("shop.added", (Column("id", Kind.INT, nullable=False),), ("id",))


def counting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Everything that a function is called with from now on."""
    called: list[Any] = []
    function = getattr(owner, name)

    def counted(*arguments: Any) -> Any:
        called.append(arguments)
        return function(*arguments)

    monkeypatch.setattr(owner, name, counted)
    return called


def test_nothing_is_parsed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    bench.begin()
    bench.log.add_schemas([SCHEMA])
    database = StoredDatabase("shop", tmp_path / "shop", bench.logs)

    def asked() -> dict[str, Any]:
        database.require_sources(("shop.orders",))
        database.register_document(())
        return database.status_document()

    first = asked()
    schemas = counting(monkeypatch, hot_log, "unpack_schema")
    manifests = counting(monkeypatch, Manifest, "decode")
    seeding, names = database.seeding(), database.source_names()
    assert asked() == first
    assert (schemas, manifests) == ([], [])
    assert database.seeding() is seeding and database.source_names() is names

    bench.log.add_schemas([SCHEMA, OTHER])
    assert database.source_names() == sorted([*SOURCES, OTHER.source])
    assert len(schemas) == 1, "the new one"
    bench.log.put_note("seeding", {**seeding, OTHER.source: {"state": "unseeded"}})
    assert database.seeding_state() == "seeding"
    bench.write()
    bench.seal()
    assert len(asked()["runs"]) == len(first["runs"]) + 1
    assert len(manifests) <= 2, "the writer's store and the server's"
    bench.logs.close()
