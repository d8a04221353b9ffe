"""What a table looks like at one point of its life, and the Avro bytes of its rows.

A ``SourceSchema`` is immutable and known by its fingerprint, which every frame of the table
carries; a ``SchemaSet`` holds all the versions that have been seen.  Nothing here depends on a
database: the sources translate their catalogue types into ``Kind``.
"""

from __future__ import annotations

import enum
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import fastavro

from databus.common.errors import FormatError, UnknownSchema, UnsupportedChange
from databus.common.frame import frame_format
from databus.common.schema.column_values import from_avro, to_avro, to_json_value
from databus.common.schema.rabin_fingerprint import crc_64_avro


class Kind(enum.StrEnum):
    """The type of a column as consumers see it; the comment after it is the Python type."""

    BOOL = "bool"  # bool
    INT = "int"  # int, -2**63 .. 2**63 - 1
    UINT64 = "uint64"  # int, 0 .. 2**64 - 1
    FLOAT = "float"  # float
    DECIMAL = "decimal"  # decimal.Decimal, fixed precision and scale
    NUMERIC = "numeric"  # decimal.Decimal, any precision and scale, NaN, infinity
    STRING = "string"  # str
    BYTES = "bytes"  # bytes
    DATE = "date"  # datetime.date
    TIME = "time"  # datetime.time, a time of day
    TIME_SPAN = "time_span"  # datetime.timedelta, may be negative or over a day
    TIMESTAMP = "timestamp"  # naive datetime.datetime
    TIMESTAMPTZ = "timestamptz"  # aware datetime.datetime in UTC
    UUID = "uuid"  # uuid.UUID
    JSON = "json"  # str, JSON text


_AVRO: dict[Kind, str | dict[str, Any]] = {
    Kind.BOOL: "boolean",
    Kind.INT: "long",
    Kind.UINT64: {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 0},
    Kind.FLOAT: "double",
    Kind.NUMERIC: "string",
    Kind.STRING: "string",
    Kind.BYTES: "bytes",
    Kind.DATE: {"type": "int", "logicalType": "date"},
    Kind.TIME: {"type": "long", "logicalType": "time-micros"},
    Kind.TIME_SPAN: "long",
    Kind.TIMESTAMP: {"type": "long", "logicalType": "local-timestamp-micros"},
    Kind.TIMESTAMPTZ: {"type": "long", "logicalType": "timestamp-micros"},
    Kind.UUID: {"type": "string", "logicalType": "uuid"},
    Kind.JSON: "string",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column: ``type_name`` is the database's own name for the type, for people."""

    name: str
    kind: Kind
    nullable: bool = True
    precision: int = 0
    scale: int = 0
    type_name: str = ""

    @property
    def avro_type(self) -> Any:
        """The Avro type, a union with null first if the column is nullable."""
        plain: Any
        if self.kind is Kind.DECIMAL:
            plain = {
                "type": "bytes",
                "logicalType": "decimal",
                "precision": self.precision,
                "scale": self.scale,
            }
        else:
            plain = _AVRO[self.kind]
        return ["null", plain] if self.nullable else plain

    @property
    def plain_avro_type(self) -> Any:
        """The Avro type without its logical type."""
        avro = self.avro_type
        plain = avro[1] if self.nullable else avro
        name = plain["type"] if isinstance(plain, dict) else plain
        return ["null", name] if self.nullable else name


@lru_cache(maxsize=512)
def _crc_64_avro(text: str) -> int:
    """Cached: it takes 0.2 us a character, and each reader of a registry checks every line."""
    return crc_64_avro(text.encode())


@dataclass(frozen=True)
class SourceSchema:
    """The columns of the table ``source`` ("schema.table") and the names of its key columns.

    ``nullable_key``: the key was configured for a table that has none of its own, so its columns
    may be null in the key record.

    Invariants:
        I1. ``key`` names columns that exist, at least one, in key order, each once.
        I2. Equal schemas have equal fingerprints on every machine.

    Raises: FormatError if I1 does not hold.
    """

    source: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    nullable_key: bool = False

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise FormatError(f"{self.source} has two columns of one name: {names}")
        if not self.key or len(set(self.key)) != len(self.key) or set(self.key) - set(names):
            raise FormatError(f"{self.source} cannot have the key {self.key}: it has {names}")

    @cached_property
    def source_id(self) -> int:
        """The source's number in frames."""
        return frame_format.source_id(self.source)

    @cached_property
    def fingerprint(self) -> int:
        """CRC-64-AVRO of the canonical JSON, logical types and key included."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        # In the byte order of Avro's single-object encoding, as a big-endian number.
        return int.from_bytes(_crc_64_avro(text).to_bytes(8, "little"), "big")

    @property
    def signed_fingerprint(self) -> int:
        """The fingerprint's bits as a signed integer, for the kernels' tables."""
        return self.fingerprint - (1 << 64) if self.fingerprint >> 63 else self.fingerprint

    @cached_property
    def key_columns(self) -> tuple[Column, ...]:
        """The key's columns in key order: all of them nullable, or none."""
        by_name = {column.name: column for column in self.columns}
        return tuple(replace(by_name[name], nullable=self.nullable_key) for name in self.key)

    @cached_property
    def key_form(self) -> list[Any]:
        """The meaning of a key's bytes, which does not depend on the names of its columns."""
        return [(one.kind, one.plain_avro_type, one.scale) for one in self.key_columns]

    @cached_property
    def row_codec(self) -> RecordCodec:
        """Codec of the whole row."""
        return RecordCodec(self.source, self.columns)

    @cached_property
    def key_codec(self) -> RecordCodec:
        """Codec of the key record."""
        return RecordCodec(f"{self.source}.key", self.key_columns)

    def encode_row(self, row: Mapping[str, Any] | Sequence[Any]) -> bytes:
        """Avro bytes of a row, given by column name or in column order."""
        return self.row_codec.encode(row)

    def encode_key(self, key: Mapping[str, Any] | Sequence[Any]) -> bytes:
        """Avro bytes of a key, given by column name (other columns are ignored) or in order."""
        return self.key_codec.encode(key)

    def decode_row(
        self, data: frame_format.Buffer, reader: SourceSchema | None = None
    ) -> dict[str, Any]:
        """The row by column name.

        With ``reader``, in that version's columns: those that this version does not have are
        None, and a value has the type and scale that it was written with.
        """
        row = self.row_codec.decode(data)
        if reader is None or reader is self:
            return row
        return {column.name: row.get(column.name) for column in reader.columns}

    def decode_key(self, data: frame_format.Buffer) -> dict[str, Any]:
        """The key by column name, in key order."""
        return self.key_codec.decode(data)

    def absent_names(self, bits: frame_format.Buffer) -> tuple[str, ...]:
        """The columns that a partial frame does not hold."""
        return tuple(self.columns[index].name for index in frame_format.unpack_bitmap(bits))

    def to_json_bytes(self) -> bytes:
        """``to_json`` as text: the content of a SCHEMA_CHANGE frame."""
        return json.dumps(self.to_json(), separators=(",", ":")).encode()

    def key_json(self, key: bytes) -> list[Any]:
        """The values of a key's bytes, in the order of the key's columns, as JSON."""
        values = self.decode_key(key)
        return [to_json_value(values[column.name]) for column in self.key_columns]

    def change_frame(self, scn: int, seq: int, commit_us: int) -> bytes:
        """The frame that announces this schema at a position of the stream."""
        return frame_format.pack_frame(
            op=frame_format.Op.SCHEMA_CHANGE,
            scn=scn,
            seq=seq,
            source=self.source_id,
            schema_fp=self.fingerprint,
            commit_us=commit_us,
            after=self.to_json_bytes(),
        )

    def to_json(self) -> dict[str, Any]:
        """The schema as plain JSON; ``from_json`` reads it back."""
        # Left out if it is false, so that older schemas retain their fingerprints.
        nullable = {"nullable_key": True} if self.nullable_key else {}
        return {
            "source": self.source,
            "key": list(self.key),
            **nullable,
            "columns": [
                {
                    "name": column.name,
                    "kind": column.kind.value,
                    "nullable": column.nullable,
                    "precision": column.precision,
                    "scale": column.scale,
                    "type": column.type_name,
                }
                for column in self.columns
            ],
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> SourceSchema:
        """The schema that ``to_json`` wrote.

        Raises:
            FormatError: a part is missing or not of its form.
        """
        try:
            columns = tuple(
                Column(
                    name=str(column["name"]),
                    kind=Kind(column["kind"]),
                    nullable=bool(column["nullable"]),
                    precision=int(column["precision"]),
                    scale=int(column["scale"]),
                    type_name=str(column["type"]),
                )
                for column in document["columns"]
            )
            nullable = document.get("nullable_key", False)
            if not isinstance(nullable, bool):
                raise TypeError(f"nullable_key is {nullable!r}")
            return SourceSchema(str(document["source"]), columns, tuple(document["key"]), nullable)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"not a schema: {error!r} in {str(document)[:200]}") from error


class RecordCodec:
    """Avro bytes of one record type.

    fastavro reads and writes the plain Avro types; logical types are converted here, by the
    functions of ``column_values``, which is several times faster than fastavro's own conversion and
    gives the same bytes.

    Invariants:
        I1. ``avro`` is a valid Avro record whose fields are in column order; a column whose
            name Avro does not allow has another field name, in Avro only.
    """

    def __init__(self, name: str, columns: tuple[Column, ...]) -> None:
        self.columns = columns
        self._names = [column.name for column in columns]
        self._fields = _avro_names(self._names)
        self._renamed = self._fields != self._names
        self._to_avro = [
            (index, convert)
            for index, column in enumerate(columns)
            if (convert := to_avro(column.kind, column.scale)) is not None
        ]
        self._from_avro = [
            (field, convert)
            for field, column in zip(self._fields, columns, strict=True)
            if (convert := from_avro(column.kind, column.scale)) is not None
        ]
        self.avro: dict[str, Any] = {
            "type": "record",
            "name": _avro_record_name(name),
            "fields": [
                {"name": field, "type": column.avro_type}
                | ({"default": None} if column.nullable else {})
                | ({"databus.name": column.name} if field != column.name else {})
                | {"databus.kind": column.kind.value}
                | ({"databus.type": column.type_name} if column.type_name else {})
                for field, column in zip(self._fields, columns, strict=True)
            ],
        }
        self._plain = fastavro.parse_schema(
            {
                "type": "record",
                "name": self.avro["name"],
                "fields": [
                    {"name": field, "type": column.plain_avro_type}
                    for field, column in zip(self._fields, columns, strict=True)
                ],
            }
        )

    def encode(self, record: Mapping[str, Any] | Sequence[Any]) -> bytes:
        """Avro bytes of a record, given by column name or in column order.

        Raises:
            FormatError: a value is missing or does not fit its column.
        """
        if isinstance(record, Mapping):
            try:
                values = [record[name] for name in self._names]
            except KeyError as error:
                raise FormatError(f"{self.avro['name']}: no value for {error}") from None
        else:
            values = list(record)
        out = io.BytesIO()
        try:
            for index, convert in self._to_avro:
                if values[index] is not None:
                    values[index] = convert(values[index])
            fastavro.schemaless_writer(
                out, self._plain, dict(zip(self._fields, values, strict=True))
            )
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
            raise FormatError(
                f"{self.avro['name']}: a value does not fit its column: {error!r}"
            ) from error
        return out.getvalue()

    def decode(self, data: frame_format.Buffer) -> dict[str, Any]:
        """The record by column name.

        Raises:
            FormatError: the bytes are not such a record.
        """
        source = io.BytesIO(data)
        try:
            found: Any = fastavro.schemaless_reader(source, self._plain, None)
            record: dict[str, Any] = found
            for field, convert in self._from_avro:
                value = record[field]
                if value is not None:
                    record[field] = convert(value)
        except Exception as error:
            raise FormatError(
                f"{self.avro['name']}: {len(data)} bytes are not this record: {error!r}"
            ) from error
        if source.tell() != len(data):
            raise FormatError(
                f"{self.avro['name']}: the record ends at byte {source.tell()} of {len(data)}"
            )
        if self._renamed:
            return {n: record[f] for n, f in zip(self._names, self._fields, strict=True)}
        return record


def _avro_record_name(name: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9_.]", "_", name)
    return ".".join(
        part if re.match(r"[A-Za-z_]", part) else f"_{part}" for part in plain.split(".")
    )


def _avro_names(names: Iterable[str]) -> list[str]:
    """Names that Avro allows, unique, equal to the given ones where those are allowed."""
    taken: set[str] = set()
    fields = []
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
        if not re.match(r"[A-Za-z_]", plain):
            plain = f"_{plain}"
        field, number = plain, 2
        while field in taken:
            field, number = f"{plain}_{number}", number + 1
        taken.add(field)
        fields.append(field)
    return fields


class SchemaSet:
    """All schema versions of a database's sources.

    Invariants:
        I1. A version that was added is never dropped or changed.
        I2. Versions of one source are numbered 1, 2, ... in the order of arrival.
        I3. No two sources have one number on the wire.
        I4. The current version of a source is the one that was announced last, or a new one that
            was added since.  A table can return to a version that it had before.
        I5. Iteration gives the versions in the order of their last announcement, so that a copy
            that announces them in this order has the same current versions.

    ``revision`` grows with every change.

    Owner: one task writes; readers in the same task.
    """

    def __init__(self, schemas: Iterable[SourceSchema] = ()) -> None:
        self._by_fingerprint: dict[int, SourceSchema] = {}
        self._versions: dict[str, list[SourceSchema]] = {}
        self._current: dict[str, SourceSchema] = {}
        self._names: dict[int, str] = {}
        self.revision = 0
        for schema in schemas:
            self.announce(schema)

    def __iter__(self) -> Iterator[SourceSchema]:
        return iter(self._by_fingerprint.values())

    def __len__(self) -> int:
        return len(self._by_fingerprint)

    def __contains__(self, fingerprint: int) -> bool:
        return fingerprint in self._by_fingerprint

    def add(self, schema: SourceSchema) -> bool:
        """Add a version; False if it was there.

        Raises:
            UnsupportedChange: another source has the same number on the wire.
        """
        if schema.fingerprint in self._by_fingerprint:
            return False
        holder = self._names.setdefault(schema.source_id, schema.source)
        if holder != schema.source:
            raise UnsupportedChange(
                f"{schema.source} and {holder} have the same number {schema.source_id:#x} in "
                "frames; rename one of the tables, or leave it out of `sources`"
            )
        self._by_fingerprint[schema.fingerprint] = schema
        self._versions.setdefault(schema.source, []).append(schema)
        self._current[schema.source] = schema
        self.revision += 1
        return True

    def announce(self, schema: SourceSchema) -> bool:
        """Make a version the current one of its source; False if it was that already.

        Raises:
            UnsupportedChange: another source has the same number on the wire.
        """
        if self.add(schema):
            return True
        if self._current[schema.source].fingerprint == schema.fingerprint:
            return False
        known = self._by_fingerprint.pop(schema.fingerprint)
        self._by_fingerprint[schema.fingerprint] = self._current[schema.source] = known
        self.revision += 1
        return True

    def by_fingerprint(self, fingerprint: int) -> SourceSchema:
        """The version that frames with this fingerprint were written with.

        Raises:
            UnknownSchema: it was never added.
        """
        try:
            return self._by_fingerprint[fingerprint]
        except KeyError:
            raise UnknownSchema(
                f"schema {fingerprint:016x} is not among the {len(self)} known ones"
            ) from None

    def latest(self, source: str) -> SourceSchema | None:
        """The current version of a source, or None."""
        return self._current.get(source)

    def has_several(self, source: str) -> bool:
        """Whether a source has more than one version."""
        return len(self._versions.get(source, ())) > 1

    def version(self, schema: SourceSchema) -> int:
        """The number of a version within its source, from 1 on."""
        return self._versions[schema.source].index(schema) + 1

    @property
    def sources(self) -> list[str]:
        """The names of all sources, sorted."""
        return sorted(self._versions)
