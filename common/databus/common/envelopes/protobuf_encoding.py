"""Typed values as Protobuf in Confluent's wire format.

A zero byte, the schema's id, the index of the message in its file (a zero byte: the first one), and
the message.  The schema is proto3: a message for each struct, ``optional`` for what may be null.

A reader finds fields by number.  So each field retains the number that it has in the newest version
of its subject, a new field gets the next one, and the number of a field that is gone is reserved.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from databus.common.envelopes.avro_encoding import DECIMAL, field_names, legal_name
from databus.common.envelopes.connect_types import BYTES, INT32, ConnectType
from databus.common.envelopes.connect_types import struct as struct_of
from databus.common.errors import FormatError
from databus.common.extras import imports_of_extra

with imports_of_extra("kafka", package="protobuf", needed_by='format = "protobuf"'):
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_SCALARS = {
    "boolean": "bool",
    "int16": "int32",
    "int32": "int32",
    "int64": "int64",
    "float32": "float",
    "float64": "double",
    "string": "string",
    "bytes": "bytes",
}
_NUMBER = struct_of("Decimal", ("scale", INT32), ("value", BYTES))
_NOT_OURS = range(19_000, 20_000)
"""Numbers that Protobuf has for itself."""
_TOKENS = re.compile(
    r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/|message\s+(?P<message>\w+)\s*\{'
    r"|reserved\s+(?P<reserved>[\d\s,to]+);|(?P<field>\w+)\s*=\s*(?P<number>\d+)|[{}]",
    re.DOTALL,
)
Fill = Callable[[Any, Any], None]
"""Puts a value that is not None into a message."""


class ProtobufRegistry(Protocol):
    """Where the schemas are; both calls may block, and raise."""

    def newest(self, subject: str) -> str:
        """The text of a subject's newest Protobuf schema; "" if there is none."""

    def register(self, subject: str, schema: str) -> int:
        """The id of a schema under a subject."""


class ProtobufEncoding:
    """Encodes typed values as Protobuf.

    Owner: one task; it retains the message of each type.
    Raises: what the registry raises; FormatError for a value that does not fit its type.
    """

    content_type = "application/vnd.confluent.protobuf"

    def __init__(self, registry: ProtobufRegistry) -> None:
        self._registry = registry
        self._known: dict[tuple[str, int], _Writer] = {}

    def encode(self, subject: str, kind: ConnectType, value: Any) -> bytes:
        """The bytes of a value; the schema is registered under the subject before the first."""
        writer = self._known.get((subject, id(kind)))
        if writer is None:
            schema = ProtobufSchema(kind, self._registry.newest(subject))
            schema_id = self._registry.register(subject, schema.text)
            writer = self._known[subject, id(kind)] = _Writer(kind, schema, schema_id)
        return writer.write(value)


class _Writer:
    def __init__(self, kind: ConnectType, schema: ProtobufSchema, schema_id: int) -> None:
        self._kind = kind  # Held, so that its id stays its own.
        self._prefix = b"\0" + struct.pack(">I", schema_id) + b"\0"
        self._make, self._fill = schema.message_class(), schema.fill

    def write(self, value: Any) -> bytes:
        message = self._make()
        try:
            self._fill(message, value)
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError(f"{self._kind.name}: a value does not fit: {error!r}") from error
        return self._prefix + bytes(message.SerializeToString())


@dataclass(slots=True)
class _Field:
    name: str
    number: int
    type: str
    label: str = ""
    json_name: str = ""


@dataclass(slots=True)
class _Message:
    name: str
    fields: list[_Field] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)


class ProtobufSchema:
    """The proto3 file of a struct: its message first, then those that it has fields of.

    ``newest`` is the text of the version before, whose numbers are retained.

    Raises: FormatError for a type that has no Protobuf form.
    """

    def __init__(self, kind: ConnectType, newest: str = "") -> None:
        self._numbers = numbers_of(newest)
        self._messages: list[_Message] = []
        self._made: dict[str, tuple[str, Fill]] = {}
        self._package = ".".join(map(legal_name, kind.name.split(".")[:-1]))
        if kind.type != "struct":
            raise FormatError(f"a value of the type {kind.type} has no Protobuf form")
        _, self.fill = self._struct(kind)

    @property
    def text(self) -> str:
        """The file."""
        lines = ['syntax = "proto3";', *([f"package {self._package};"] if self._package else [])]
        for message in self._messages:
            lines += ["", f"message {message.name} {{"]
            for one in message.fields:
                options = f" [json_name = {_quoted(one.json_name)}]" if one.json_name else ""
                label = f"{one.label} " if one.label else ""
                lines.append(f"  {label}{one.type} {one.name} = {one.number}{options};")
            if message.reserved:
                lines.append(f"  reserved {', '.join(map(str, message.reserved))};")
            lines.append("}")
        return "\n".join(lines) + "\n"

    def message_class(self) -> Callable[[], Any]:
        """The class of the first message."""
        file = descriptor_pb2.FileDescriptorProto(
            name="schema.proto", package=self._package, syntax="proto3"
        )
        for message in self._messages:
            _describe(file.message_type.add(name=message.name), message, self._package)
        pool = descriptor_pool.DescriptorPool()
        pool.AddSerializedFile(file.SerializeToString())
        full = f"{self._package}.{self._messages[0].name}".removeprefix(".")
        made: Callable[[], Any] = message_factory.GetMessageClass(pool.FindMessageTypeByName(full))
        return made

    def _struct(self, kind: ConnectType) -> tuple[str, Fill]:
        """The name of a struct's message, and what fills it."""
        if kind.name not in self._made:
            message = self._new_message(kind.name.rpartition(".")[2])
            fills = []
            names = field_names(kind)
            for name, (original, one) in zip(names, kind.fields, strict=True):
                fills.append((original, self._field(message, name, original, one)))
            self._number(message)

            def fill(into: Any, value: Any) -> None:
                for original, fill_field in fills:
                    found = value[original]
                    if found is not None:
                        fill_field(into, found)

            self._made[kind.name] = (message.name, fill)
        return self._made[kind.name]

    def _field(self, message: _Message, name: str, original: str, kind: ConnectType) -> Fill:
        """Add a field; what fills it."""
        json_name = "" if original == _camel(name) else original
        if kind.items is not None:
            type_, fill = self._list(f"{message.name}_{name}", kind.items)
        elif kind.name == DECIMAL:
            type_, fill_number = self._struct(_NUMBER)
            scale = int(dict(kind.parameters)["scale"])

            def fill(into: Any, value: Any) -> None:
                fill_number(into, {"scale": scale, "value": value})
        elif kind.type == "struct":
            type_, fill = self._struct(kind)
        elif kind.type in _SCALARS:
            label = "optional" if kind.optional else ""
            message.fields.append(_Field(name, 0, _SCALARS[kind.type], label, json_name))
            return lambda into, value: setattr(into, name, value)
        else:
            raise FormatError(f"a value of the type {kind.type} has no Protobuf form")
        message.fields.append(_Field(name, 0, type_, "", json_name))

        def fill_message(into: Any, value: Any) -> None:
            inner = getattr(into, name)
            inner.SetInParent()
            fill(inner, value)

        return fill_message

    def _list(self, name: str, items: ConnectType) -> tuple[str, Fill]:
        """A message around a list, so that null is not the empty list, nor an item its zero."""
        message = self._new_message(f"{name}_list")
        item = self._new_message(f"{name}_item")
        fill_item = self._field(item, "value", "value", items)
        message.fields.append(_Field("items", 1, item.name, "repeated"))
        self._number(item)

        def fill(into: Any, value: Any) -> None:
            for one in value:
                made = into.items.add()
                if one is not None:
                    fill_item(made, one)

        return message.name, fill

    def _new_message(self, name: str) -> _Message:
        found, number = legal_name(name), 2
        while found in {one.name for one in self._messages}:
            found, number = f"{legal_name(name)}_{number}", number + 1
        self._messages.append(_Message(found))
        return self._messages[-1]

    def _number(self, message: _Message) -> None:
        before = self._numbers.get(message.name, {})
        used = {number for numbers in before.values() for number in numbers}
        following = max(used, default=0) + 1
        for one in message.fields:
            if known := before.get(one.name):
                one.number = known[0]
                continue
            following = _NOT_OURS.stop if following in _NOT_OURS else following
            one.number, following = following, following + 1
        message.reserved = sorted(used - {one.number for one in message.fields})


def numbers_of(text: str) -> dict[str, dict[str, list[int]]]:
    """The number of each field of each message of a proto file; "" has the reserved ones."""
    found: dict[str, dict[str, list[int]]] = {}
    within: list[str] = []
    for token in _TOKENS.finditer(text):
        if token["message"]:
            within.append(token["message"])
        elif token[0] == "{":
            within.append("")
        elif token[0] == "}":
            del within[-1:]
        elif within and token["field"]:
            found.setdefault(within[-1], {})[token["field"]] = [int(token["number"])]
        elif within and token["reserved"]:
            reserved = found.setdefault(within[-1], {}).setdefault("", [])
            for part in token["reserved"].split(","):
                first, _, last = part.partition("to")
                reserved += range(int(first), int(last or first) + 1)
    return found


def _describe(into: Any, message: _Message, package: str) -> None:
    """The message as Protobuf's own descriptor."""
    kinds = descriptor_pb2.FieldDescriptorProto
    choices = [one for one in message.fields if one.label == "optional"]
    choice_of = {one.name: number for number, one in enumerate(choices)}
    for one in message.fields:
        made = into.field.add(name=one.name, number=one.number, json_name=one.json_name or None)
        made.label = kinds.LABEL_REPEATED if one.label == "repeated" else kinds.LABEL_OPTIONAL
        if one.type in _SCALARS.values():
            made.type = kinds.Type.Value(f"TYPE_{one.type.upper()}")
        else:
            made.type = kinds.TYPE_MESSAGE
            made.type_name = f".{package}.{one.type}".replace("..", ".")
        if one.name in choice_of:
            made.proto3_optional, made.oneof_index = True, choice_of[one.name]
    names = {one.name for one in message.fields}
    for one in choices:
        name = f"_{one.name}"
        while name in names:
            name = f"X{name}"
        names.add(name)
        into.oneof_decl.add(name=name)
    for number in message.reserved:
        into.reserved_range.add(start=number, end=number + 1)


def _camel(name: str) -> str:
    """The name that a field has in Protobuf's JSON by default."""
    return re.sub(r"_+(.?)", lambda found: found[1].upper(), name)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
