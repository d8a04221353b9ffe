"""Versions of a Parquet table: two exports that overlap."""

from __future__ import annotations

from pathlib import Path

import pytest

from databus.client.exports.parquet_versions import LocalVersions
from databus.common.errors import StoreBusy


def test_an_export_that_begins_while_another_writes_is_refused_and_harms_nothing(
    tmp_path: Path,
) -> None:
    versions = LocalVersions(tmp_path / "shop.orders")
    version = versions.begin()
    Path(version.path("part-1.parquet")).write_bytes(b"rows")
    with pytest.raises(StoreBusy, match="another export is writing"):
        LocalVersions(tmp_path / "shop.orders").begin()
    version.settle({"scn": 5})
    version.commit()
    current = versions.current()
    assert [Path(name).name for name in current.files] == ["part-1.parquet"]
    assert current.note == {"scn": 5}
    second = versions.begin()
    del second  # it failed: what it held is let go
    versions.begin().settle({})
