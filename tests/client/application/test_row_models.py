"""``event.as_(Model)``, and the classes that ``databus schema --python`` prints."""

from __future__ import annotations

import datetime as dt
import sys
import types
import uuid
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NotRequired, TypedDict, get_args

import pydantic
import pytest

from databus.client.application.row_models import ModelForm, model_code, row_as
from databus.common.errors import UsageError
from databus.common.frame.frame_format import Op, pack_bitmap
from databus.common.schema.source_schema import Column, Kind, SchemaSet, SourceSchema
from tests.client.application.test_row_columns import events_of

NOW = dt.datetime(2026, 3, 1, 12)
ROW: dict[str, Any] = {
    "id": 7, "on": True, "big": 2**63, "ratio": 0.5, "price": Decimal("1.50"),
    "any": Decimal("NaN"), "state": "paid", "raw": b"\x00", "day": NOW.date(), "at": NOW.time(),
    "span": dt.timedelta(days=-1), "local": NOW, "utc": NOW.replace(tzinfo=dt.UTC),
    "ref": uuid.UUID(int=5), "doc": {"a": [1]}, "tags": ["x", None], "class": "c",
    "order-id": 3, "_hidden": None, "2nd": "z",
}  # fmt: skip
KINDS = {
    "id": Kind.INT, "on": Kind.BOOL, "big": Kind.UINT64, "ratio": Kind.FLOAT,
    "price": Kind.DECIMAL, "any": Kind.NUMERIC, "state": Kind.STRING, "raw": Kind.BYTES,
    "day": Kind.DATE, "at": Kind.TIME, "span": Kind.TIME_SPAN, "local": Kind.TIMESTAMP,
    "utc": Kind.TIMESTAMPTZ, "ref": Kind.UUID, "doc": Kind.JSON, "tags": Kind.STRING,
    "class": Kind.STRING, "order-id": Kind.INT, "_hidden": Kind.STRING, "2nd": Kind.STRING,
}  # fmt: skip
EVERY = SourceSchema(
    "shop.order_lines",
    tuple(
        Column(name, kind, nullable=name != "id", precision=10 if kind is Kind.DECIMAL else 0,
               scale=2 if kind is Kind.DECIMAL else 0,
               type_name="text[]" if name == "tags" else "")
        for name, kind in KINDS.items()
    ),
    ("id",),
)  # fmt: skip
SMALL = SourceSchema(
    "shop.orders",
    (Column("id", Kind.INT, nullable=False), Column("state", Kind.STRING, nullable=True)),
    ("id",),
)


@dataclass
class Order:
    id: int


class OrderDict(TypedDict):
    id: int
    state: NotRequired[str | None]


class OrderModel(pydantic.BaseModel):
    id: int
    state: str | None = None


def made(text: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of a printed module, as if it were imported."""
    module = types.ModuleType("printed")
    monkeypatch.setitem(sys.modules, "printed", module)
    exec(text, module.__dict__)  # the text is what the command prints
    return getattr(module, name)


@pytest.mark.parametrize("form", get_args(ModelForm))
def test_a_printed_class_takes_every_value_as_it_comes(
    form: ModelForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = model_code(EVERY, form)
    model = made(text, "OrderLines", monkeypatch)
    found: Any = row_as(model, ROW, "here", frozenset())
    values = (
        list(found.values())
        if form == "typeddict"
        else [getattr(found, name) for name in model.__annotations__]
    )
    # The representation: NaN differs from itself, and 1.5 equals 1.50.
    assert repr(values) == repr(list(ROW.values()))
    nothing = dict.fromkeys(ROW) | {"id": 7}
    assert row_as(model, nothing, "here", frozenset()) is not None


def test_a_printed_class_is_readable() -> None:
    assert (
        model_code(SMALL, "dataclass")
        == '''from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Orders:
    """A row of shop.orders."""

    id: int
    state: str | None
'''
    )


def test_events_come_as_objects_of_the_applications_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    after = SMALL.encode_row({"id": 7, "state": "paid"})
    insert, delete, partial = events_of(
        (Op.INSERT, 7, {"after": after}),
        (Op.DELETE, 7, {"before": after}),
        (Op.UPDATE, 7, {"after": after, "absent": pack_bitmap([1], 2)}),
        schemas=SchemaSet([SMALL]),
        schema=SMALL,
    )
    assert insert.as_(Order) == Order(7)
    assert insert.as_(OrderDict) == {"id": 7, "state": "paid"}
    assert insert.as_(OrderModel) == OrderModel(id=7, state="paid")
    assert delete.as_(Order) is None
    assert partial.as_(OrderDict) == {"id": 7}
    strict = made(model_code(SMALL, "dataclass"), "Orders", monkeypatch)
    with pytest.raises(UsageError, match=r"did not send state.*give these fields a default"):
        partial.as_(strict)


def test_a_row_that_does_not_fit_names_columns_and_no_values() -> None:
    @dataclass
    class Wrong:
        id: int
        state: int
        total: Decimal

    with pytest.raises(UsageError) as caught:
        row_as(Wrong, {"id": 1, "state": "geheim"}, "the row of shop.orders at 5:0", frozenset())
    assert "the row of shop.orders at 5:0 is not a Wrong" in caught.value.message
    assert "state: " in caught.value.message
    assert "total: Field required" in caught.value.message
    assert "geheim" not in str(caught.value)
