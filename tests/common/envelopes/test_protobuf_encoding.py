"""Typed values as Protobuf: read back by what protoc makes of the registered text."""

from __future__ import annotations

import itertools
from dataclasses import replace
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Any

import grpc_tools
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc

from databus.common.envelopes.connect_types import (
    BYTES,
    INT16,
    INT32,
    OPTIONAL_STRING,
    STRING,
    ConnectType,
    array,
    struct,
)
from databus.common.envelopes.named_envelopes import ENVELOPES, make_envelope
from databus.common.envelopes.plain_envelopes import ANY
from databus.common.envelopes.protobuf_encoding import (
    ProtobufEncoding,
    ProtobufSchema,
    numbers_of,
)
from databus.common.envelopes.row_types import Product
from databus.common.errors import FormatError
from databus.common.schema.source_schema import SourceSchema
from databus.common.sink_config import TYPED_ENVELOPES
from tests.client.tables.test_arrow_rows import EVERY
from tests.common.envelopes.test_debezium_envelope import CREATED, MARIADB
from tests.support.schemas import columns_of

_numbers = itertools.count()


class Registry:
    """Numbers the schemas, and reads records by what protoc makes of their texts."""

    def __init__(self, folder: Path) -> None:
        self.given: list[tuple[str, str]] = []
        self._folder = folder

    def newest(self, subject: str) -> str:
        return next((text for one, text in reversed(self.given) if one == subject), "")

    def register(self, subject: str, schema: str) -> int:
        self.given.append((subject, schema))
        return len(self.given)

    def read(self, data: bytes) -> Any:
        """The message."""
        assert (data[0], data[5]) == (0, 0)
        message = compiled(self.given[int.from_bytes(data[1:5], "big") - 1][1], self._folder)()
        message.ParseFromString(data[6:])
        return message


def compiled(text: str, folder: Path) -> Any:
    """The class of the first message of a file."""
    name = f"schema{next(_numbers)}.proto"
    (folder / name).write_text(text)
    out = folder / f"{name}.bin"
    include = resources.files(grpc_tools) / "_proto"
    command = ["protoc", f"-I{folder}", f"-I{include}", f"--descriptor_set_out={out}", name]
    assert protoc.main(command) == 0, text
    files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(files.file[0].SerializeToString())
    first = files.file[0].message_type[0].name
    found = pool.FindMessageTypeByName(f"{files.file[0].package}.{first}".removeprefix("."))
    return message_factory.GetMessageClass(found)


def plain(message: Any, kind: ConnectType) -> Any:
    """A message as the value that it was made of."""
    found: dict[str, Any] = {}
    fields = zip(sorted(message.DESCRIPTOR.fields, key=lambda f: f.index), kind.fields, strict=True)
    for field, (name, one) in fields:
        value = getattr(message, field.name)
        if field.has_presence and not message.HasField(field.name):
            value = None
        elif one.items is not None:
            items = [item.value if item.HasField("value") else None for item in value.items]
            value = items
        elif one.name == "org.apache.kafka.connect.data.Decimal":
            assert str(value.scale) == dict(one.parameters)["scale"]
            value = value.value
        elif one.type == "struct":
            value = plain(value, one)
        found[name] = value
    return found


@pytest.mark.parametrize("name", TYPED_ENVELOPES)
@pytest.mark.parametrize("product", ["mariadb", "postgresql"])
def test_a_record_of_a_typed_envelope_is_read_back(
    name: str, product: Product, tmp_path: Path
) -> None:
    registry = Registry(tmp_path)
    encoding = ProtobufEncoding(registry)
    row: dict[str, Any] = dict.fromkeys((column.name for column in EVERY.columns), None)
    row |= {"id": 7, "bool": False, "int": -(2**63), "uint64": 2**63, "float": 0.1}
    row |= {"dec": Decimal("1.25"), "numeric": Decimal("-1e-7"), "text": "", "bytes": b"\xff"}
    for after in (row, dict.fromkeys(row, None) | {"id": 8}):
        change = replace(CREATED, schema=EVERY, key={"id": after["id"]}, after=after)
        (record,) = make_envelope(name, replace(MARIADB, product=product)).records(change)
        assert record.value_type is not None and record.key_type is not None
        data = encoding.encode(f"{record.topic}-value", record.value_type, record.value)
        assert plain(registry.read(data), record.value_type) == record.value
        key = encoding.encode(f"{record.topic}-key", record.key_type, record.key)
        assert plain(registry.read(key), record.key_type) == {"id": after["id"]}


def test_the_text_has_the_first_message_first_and_names_of_json(tmp_path: Path) -> None:
    inner = struct("b.shop.t.Value", ("n", INT16), ("a b", OPTIONAL_STRING), ("_n", INT32))
    kind = struct("b.shop.t.Envelope", ("ts_ms", INT32), ("after", inner.as_optional()))
    text = ProtobufSchema(kind).text
    assert text == (
        'syntax = "proto3";\npackage b.shop.t;\n\n'
        'message Envelope {\n  int32 ts_ms = 1 [json_name = "ts_ms"];\n  Value after = 2;\n}\n\n'
        "message Value {\n  int32 n = 1;\n"
        '  optional string a_b = 2 [json_name = "a b"];\n'
        '  int32 _n = 3 [json_name = "_n"];\n}\n'
    )
    assert compiled(text, tmp_path)().DESCRIPTOR.fields[0].json_name == "ts_ms"


def test_null_the_empty_list_and_null_in_a_list_are_three_values(tmp_path: Path) -> None:
    kind = struct("t", ("l", array(STRING).as_optional()), ("m", array(BYTES)))
    registry = Registry(tmp_path)
    encoding = ProtobufEncoding(registry)
    for value in ({"l": None, "m": []}, {"l": [], "m": [b"", None]}, {"l": ["", None], "m": []}):
        assert plain(registry.read(encoding.encode("t", kind, value)), kind) == value


def versions_of(registry: Registry, *columns: str) -> list[dict[str, int]]:
    """The numbers of the row's fields after each version of a table, in the flat envelope."""
    found = []
    for text in columns:
        schema = SourceSchema("shop.t", columns_of(text), ("id",))
        row = dict.fromkeys((column.name for column in schema.columns), 1)
        change = replace(CREATED, schema=schema, key={"id": 1}, after=row)
        (record,) = make_envelope("flat", MARIADB).records(change)
        assert record.value_type is not None
        ProtobufEncoding(registry).encode("t-value", record.value_type, record.value)
        numbers = numbers_of(registry.newest("t-value"))["Flat"]
        found.append({name: number for name, (number, *_) in numbers.items() if name[:2] != "__"})
    return found


def test_a_field_retains_its_number_and_that_of_a_gone_one_is_not_given_again(
    tmp_path: Path,
) -> None:
    registry = Registry(tmp_path)
    first, second, third = versions_of(
        registry, "id INT!, a INT, b INT", "id INT!, b INT, c INT", "id INT!, a INT, b INT, d INT"
    )
    assert first == {"id": 1, "a": 2, "b": 3}
    assert second == {"id": 1, "b": 3, "c": 9, "": 2}
    assert third == {"id": 1, "b": 3, "a": 10, "d": 11, "": 2}
    assert "reserved 2, 9;" in registry.given[-1][1]
    compiled(registry.given[-1][1], tmp_path)


def test_the_numbers_of_a_text_are_found_however_it_is_written() -> None:
    text = """
      /* message Old { int32 z = 9; } */ syntax = "proto3";
      message A{string a=1[json_name="x = 7"]; message B { int32 b = 2; } reserved 4 to 6,9;
        enum E { ZERO = 0; } // c = 3
        int32 d = 3; }
    """
    assert numbers_of(text) == {"A": {"a": [1], "": [4, 5, 6, 9], "d": [3]}, "B": {"b": [2]},
                                "": {"ZERO": [0]}}  # fmt: skip


def test_what_has_no_types_has_no_protobuf_form(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no Protobuf form"):
        ProtobufEncoding(Registry(tmp_path)).encode("s", ANY, {})
    assert set(TYPED_ENVELOPES) < set(ENVELOPES)


def test_a_value_that_does_not_fit_is_a_format_error(tmp_path: Path) -> None:
    kind = struct("shop.orders.Value", ("id", INT32))
    for value in ({"id": "seven"}, {"id": 2**40}, {}):
        with pytest.raises(FormatError, match=r"shop\.orders\.Value"):
            ProtobufEncoding(Registry(tmp_path)).encode("s", kind, value)
