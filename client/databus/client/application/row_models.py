"""Rows as objects of the application's own classes, and the source text of such a class.

A class is a dataclass, a TypedDict or a pydantic model.  pydantic checks and converts the values.
"""

from __future__ import annotations

import functools
import keyword
import re
import sys
import typing
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from databus.client.application.json_documents import converters
from databus.common.errors import UsageError
from databus.common.schema.source_schema import Column, Kind, SourceSchema

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
ModelForm = Literal["dataclass", "typeddict", "pydantic"]

_TYPES: dict[Kind, tuple[str, str]] = {
    Kind.BOOL: ("bool", ""),
    Kind.INT: ("int", ""),
    Kind.UINT64: ("int", ""),
    Kind.FLOAT: ("float", ""),
    Kind.DECIMAL: ("Decimal", "from decimal import Decimal"),
    # NaN and infinity are values of PostgreSQL's numeric, which pydantic refuses by default.
    Kind.NUMERIC: ("Annotated[Decimal, Field(allow_inf_nan=True)]", "from decimal import Decimal"),
    Kind.STRING: ("str", ""),
    Kind.BYTES: ("bytes", ""),
    Kind.DATE: ("dt.date", "import datetime as dt"),
    Kind.TIME: ("dt.time", "import datetime as dt"),
    Kind.TIME_SPAN: ("dt.timedelta", "import datetime as dt"),
    Kind.TIMESTAMP: ("dt.datetime", "import datetime as dt"),
    Kind.TIMESTAMPTZ: ("dt.datetime", "import datetime as dt"),
    Kind.UUID: ("UUID", "from uuid import UUID"),
    Kind.JSON: ("Any", "from typing import Any"),
}
_ARRAY = ("list[Any] | str", "from typing import Any")


def row_as(model: type[T], row: dict[str, Any], where: str, absent: frozenset[str]) -> T:
    """The row as an object of ``model``: columns by name, values checked by type.

    Raises:
        UsageError: the row lacks a column that the class requires, or a value is of another type.
    """
    from pydantic import ValidationError

    try:
        validated: T = _adapter(cast("Any", model)).validate_python(row)
        return validated
    except ValidationError as error:
        # Without the values, which may be secrets.
        found = [
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
            for one in error.errors(include_url=False, include_input=False, include_context=False)
        ]
        lacks = (
            f"; the source did not send {', '.join(sorted(absent))}, because they did not change: "
            "give these fields a default"
            if absent
            else ""
        )
        raise UsageError(f"{where} is not a {model.__name__}: {'; '.join(found)}{lacks}") from None


@functools.cache
def _adapter(model: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    if sys.version_info < (3, 12) and typing.is_typeddict(model):
        return TypeAdapter(_typed_dict(model))
    return TypeAdapter(model)


def _typed_dict(model: type[Any]) -> Any:
    """The same TypedDict as one of typing_extensions, which pydantic needs before Python 3.12."""
    import typing_extensions

    hints = typing.get_type_hints(model, include_extras=True)
    for name in model.__optional_keys__:
        if typing.get_origin(hints[name]) is not typing.NotRequired:
            hints[name] = typing.NotRequired[hints[name]]
    return typing_extensions.TypedDict(model.__name__, hints)  # type: ignore[operator] # made here


def model_code(schema: SourceSchema, form: ModelForm) -> str:
    """The Python text of a class whose objects are the rows of ``schema``."""
    arrays = {name for name, _ in converters(schema)}
    imports = {"from __future__ import annotations"}
    fields: list[tuple[str, str, str]] = []
    taken: set[str] = set()
    for column in schema.columns:
        kind, needed = _type_of(column, arrays)
        field = _field_name(column.name, taken)
        if form != "typeddict" and field != column.name:
            kind = f"Annotated[{kind}, Field(validation_alias={column.name!r})]"
        if "Annotated[" in kind:
            imports |= {"from typing import Annotated", "from pydantic import Field"}
        imports |= {needed} - {""}
        fields.append((column.name, field, kind))
    name = _class_name(schema.source)
    if form == "typeddict":
        imports.add("from typing import TypedDict")
        if any(keyword.iskeyword(one) or not one.isidentifier() for one, _, _ in fields):
            # Only the functional form has such names, and its types are not postponed.
            imports.remove("from __future__ import annotations")
            rows = "".join(f"        {column!r}: {kind},\n" for column, _, kind in fields)
            return _module(
                imports, f'{name} = TypedDict(\n    "{name}",\n    {{\n{rows}    }},\n)\n'
            )
        fields = [(column, column, kind) for column, _, kind in fields]
        head = f"class {name}(TypedDict):"
    elif form == "pydantic":
        imports.add("from pydantic import BaseModel")
        head = f"class {name}(BaseModel):"
    else:
        imports.add("from dataclasses import dataclass")
        head = f"@dataclass(frozen=True, slots=True)\nclass {name}:"
    rows = "".join(f"    {field}: {kind}\n" for _, field, kind in fields)
    return _module(imports, f'{head}\n    """A row of {schema.source}."""\n\n{rows}')


def _type_of(column: Column, converted: set[str]) -> tuple[str, str]:
    kind, needed = _TYPES[column.kind]
    if column.kind is Kind.STRING and column.name in converted:
        kind, needed = _ARRAY
    if column.nullable and kind != "Any":
        kind += " | None"
    return kind, needed


def _field_name(column: str, taken: set[str]) -> str:
    """The column's name, or one like it that a field may have."""
    name = re.sub(r"\W", "_", column).strip("_") or "column"
    if name[0].isdigit():
        name = f"column_{name}"
    while keyword.iskeyword(name) or name in taken:
        name += "_"
    taken.add(name)
    return name


def _class_name(source: str) -> str:
    words = re.split(r"[\W_]+", source.rpartition(".")[2])
    name = "".join(word[:1].upper() + word[1:] for word in words)
    return name if name[:1].isalpha() else f"Row{name}"


def _module(imports: set[str], body: str) -> str:
    future = [one for one in imports if "__future__" in one]
    modules = sorted(one for one in imports if one.startswith("import "))
    names: dict[str, set[str]] = {}
    for one in imports - {*future, *modules}:
        module, _, name = one.removeprefix("from ").partition(" import ")
        names.setdefault(module, set()).add(name)
    others = [f"from {m} import {', '.join(sorted(n))}" for m, n in sorted(names.items())]
    standard = [one for one in others if "pydantic" not in one]
    foreign = [one for one in others if "pydantic" in one]
    blocks = ["\n".join(part) for part in (future, modules + standard, foreign) if part]
    return "\n\n".join(blocks) + "\n\n\n" + body
