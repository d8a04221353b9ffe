"""The arrays of described tables: each one is found, and thousands do not make them again."""

from __future__ import annotations

from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.sources.postgres.kernels import pgoutput_kernels
from databus.relay.sources.postgres.rows.postgres_kernel_tables import PostgresKernelTables

COUNT = 3000


def schema_of(number: int) -> SourceSchema:
    columns = (
        Column("id", Kind.INT, nullable=False),
        *(Column(f"c{at}", Kind.STRING) for at in range(number % 5)),
    )
    return SourceSchema(f"public.t{number}", columns, ("id",))


def found(tables: PostgresKernelTables, oid: int) -> tuple[int, int, int] | None:
    """Source, fingerprint and number of columns of a table, as the kernel looks for it."""
    index, relations, columns, keys, fields = tables.arrays
    slot = (oid * 2654435761 >> 7) & (len(index) - 1)
    while (number := int(index[slot])) >= 0:
        line = relations[number].tolist()
        if line[pgoutput_kernels.OID] == oid:
            first, count, key = line[2], line[3], line[4]
            assert len(columns[first : first + count]) == count <= fields.shape[1]
            assert keys[key] == 0 or not line[1]
            return line[6], line[7], count
        slot = (slot + 1) & (len(index) - 1)
    return None


def test_thousands_of_tables_are_found_and_few_of_them_move_the_arrays() -> None:
    tables = PostgresKernelTables()
    moved, last = 0, 0
    for number in range(COUNT):
        tables.put(16_384 + number, schema_of(number))
        at = tables.arrays[1].__array_interface__["data"][0]
        moved, last = moved + (at != last), at
    assert moved <= 12
    for number in (0, 1, 7, 8, 9, COUNT // 2, COUNT - 1):
        schema = schema_of(number)
        expected = schema.source_id, schema.signed_fingerprint, len(schema.columns)
        assert found(tables, 16_384 + number) == expected
    assert found(tables, 1) is None


def test_a_new_definition_replaces_the_old_one_and_a_forgotten_table_is_not_found() -> None:
    tables = PostgresKernelTables()
    for number in range(30):
        tables.put(100 + number, schema_of(number))
    tables.put(105, schema_of(4))
    assert found(tables, 105) == found(tables, 104)
    tables.put(106, None)
    assert found(tables, 106) == (0, 0, 0)
    tables.forget(104)
    assert found(tables, 104) is None
    assert len(tables.arrays[1]) == 29
    tables.put(104, schema_of(3))
    assert found(tables, 104) == found(tables, 103)
