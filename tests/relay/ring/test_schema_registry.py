"""The registry of schema versions: durable, growing, total."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.common.errors import FormatError, StoreError
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.ring.schema_registry import (
    Registry,
    RegistryReader,
    end_path,
    read_line,
    registry_line,
)


def version(number: int) -> SourceSchema:
    columns = [Column("id", Kind.INT, nullable=False)]
    columns += [Column(f"naïve {n}", Kind.STRING) for n in range(number)]
    return SourceSchema("shop.items", tuple(columns), ("id",))


def test_a_reader_sees_versions_as_they_are_added(tmp_path: Path) -> None:
    path = tmp_path / "schemas.jsonl"
    reader = RegistryReader(path)
    assert reader.refresh() is False
    registry = Registry(path)
    assert registry.add([version(0), version(1), version(0)]) == [version(0), version(1)]
    assert reader.refresh() is True
    assert list(reader.schemas) == [version(0), version(1)]
    assert registry.add([version(1)]) == []
    assert reader.refresh() is False
    registry.add([version(2)])
    assert reader.refresh() is True
    assert reader.schemas.latest("shop.items") == version(2)
    registry.close()


def test_a_version_that_a_table_returns_to_is_the_current_one_again(tmp_path: Path) -> None:
    path = tmp_path / "schemas.jsonl"
    registry, reader = Registry(path), RegistryReader(path)
    registry.announce([version(0), version(1), version(0)])
    registry.announce([version(0)])
    assert registry.add([version(1)]) == []
    reader.refresh()
    for schemas in (registry.schemas, reader.schemas):
        assert schemas.latest("shop.items") == version(0)
        assert list(schemas) == [version(1), version(0)]
        assert [schemas.version(one) for one in schemas] == [2, 1]
    assert len(path.read_bytes().splitlines()) == 3
    registry.close()
    again = Registry(path)
    assert again.schemas.latest("shop.items") == version(0)
    again.close()


def test_a_reopened_registry_knows_its_versions_and_adds_none_twice(tmp_path: Path) -> None:
    path = tmp_path / "schemas.jsonl"
    first = Registry(path)
    first.add([version(0)])
    first.close()
    second = Registry(path)
    assert second.add([version(0), version(1)]) == [version(1)]
    second.close()
    assert len(path.read_bytes().splitlines()) == 2


def test_half_a_line_is_not_there_for_readers_and_is_cut_off_by_the_next_writer(
    tmp_path: Path,
) -> None:
    path = tmp_path / "schemas.jsonl"
    line = registry_line(version(1))
    path.write_bytes(registry_line(version(0)) + line[: len(line) // 2])
    reader = RegistryReader(path)
    reader.refresh()
    assert list(reader.schemas) == [version(0)]
    registry = Registry(path)
    registry.add([version(2)])
    registry.close()
    reader.refresh()
    assert list(reader.schemas) == [version(0), version(2)]


def test_what_a_full_disk_left_of_a_line_is_cut_off_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "schemas.jsonl"
    registry, reader = Registry(path), RegistryReader(path)
    registry.add([version(0)])
    write = os.pwrite
    fits = len(registry_line(version(1), is_ahead=True)) + 10
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:fits], at))
        with pytest.raises(StoreError, match=f"only {fits} of"):
            registry.add([version(1), version(2)])
        reader.refresh()
        assert list(reader.schemas) == [version(0), version(1)]
        assert list(registry.schemas) == [version(0)], "the others are not on disk"
    registry.add([version(2), version(1)])
    reader.refresh()
    assert list(reader.schemas) == [version(0), version(2), version(1)]
    registry.close()
    again = Registry(path)
    assert len(again.schemas) == 3
    again.close()


@pytest.mark.parametrize("seed", range(40))
def test_a_line_that_a_power_loss_tore_is_announced_again(tmp_path: Path, seed: int) -> None:
    rng, sector = random.Random(seed), 512
    path = tmp_path / "schemas.jsonl"
    registry = Registry(path)
    registry.add([version(0), version(rng.randrange(1, 10))])
    synced, end = path.read_bytes(), end_path(path).read_bytes()
    registry.add([version(20)])
    registry.close()
    end_path(path).write_bytes(end)  # it is written after the sync that the power loss prevents
    now, retained = path.read_bytes(), path.stat().st_size - rng.choice((0, 1, 300, 1000))
    torn = bytearray(now[:retained])
    for at in range(len(synced) // sector * sector, retained, sector):
        if rng.random() < 0.5:
            old = synced[at : at + sector].ljust(sector, b"\0")
            torn[at : at + sector] = old[: len(torn[at : at + sector])]
    path.write_bytes(torn)
    reader = RegistryReader(path)
    reader.refresh()
    registry = Registry(path)
    registry.add([version(20), version(21)])
    registry.close()
    reader.refresh()
    assert list(reader.schemas)[2:] == [version(20), version(21)]
    assert path.read_bytes() == now + registry_line(version(21), is_ahead=True)


def test_every_cut_of_what_was_synced_is_named(tmp_path: Path) -> None:
    path = tmp_path / "schemas.jsonl"
    registry = Registry(path)
    registry.announce([version(0), version(1)])
    registry.announce([version(0)])
    registry.close()
    whole, end = path.read_bytes(), end_path(path).read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        for begin in (Registry, lambda path: RegistryReader(path).refresh()):
            with pytest.raises(FormatError, match=str(path)):
                begin(path)
    path.unlink()
    with pytest.raises(FormatError, match=str(path)):
        Registry(path)
    # Longer than it was synced is right; so is a folder of an earlier release.
    path.write_bytes(whole + registry_line(version(2)))
    Registry(path).close()
    assert end_path(path).read_bytes() != end
    end_path(path).unlink()
    path.write_bytes(whole)
    Registry(path).close()
    assert end_path(path).exists()


def test_a_registry_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "schemas.jsonl"
    registry = Registry(path)
    registry.add([version(0), version(1)])
    registry.close()
    reader = RegistryReader(path)
    assert reader.refresh()
    path.write_bytes(registry_line(version(0)))
    with pytest.raises(FormatError, match="was cut to"):
        reader.refresh()


def test_zeros_before_a_version_that_is_whole_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "schemas.jsonl"
    lines = [registry_line(version(number)) for number in range(3)]
    path.write_bytes(lines[0] + bytes(len(lines[1]) - 1) + b"\n" + lines[2])
    with pytest.raises(StoreError, match=f"damaged at offset {len(lines[0])}"):
        Registry(path)


def test_a_line_whose_fingerprint_is_another_one_is_refused_by_its_number(tmp_path: Path) -> None:
    document = json.loads(registry_line(version(1)))
    document["fingerprint"] = "0" * 16
    path = tmp_path / "schemas.jsonl"
    path.write_bytes(registry_line(version(0)) + json.dumps(document).encode() + b"\n")
    reader = RegistryReader(path)
    with pytest.raises(FormatError, match="line 2, offset"):
        reader.refresh()
    assert list(reader.schemas) == [version(0)]


@given(st.binary(max_size=80))
def test_any_bytes_are_a_version_or_a_format_error(line: bytes) -> None:
    with pytest.raises(FormatError):
        read_line(line, "test")


@given(st.integers(0, 200), st.binary(min_size=1, max_size=3))
def test_a_damaged_line_is_a_version_of_equal_fingerprint_or_a_format_error(
    at: int, noise: bytes
) -> None:
    line = registry_line(version(2))
    damaged = line[:at] + noise + line[at + len(noise) :]
    try:
        found = read_line(damaged, "test")
    except FormatError:
        return
    assert registry_line(found).strip() == line.strip()
