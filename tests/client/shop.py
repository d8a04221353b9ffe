"""Windows of a small shop, as bytes, for the tests of the client."""

from __future__ import annotations

from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema

ORDERS = SourceSchema(
    "shop.orders",
    (
        Column("id", Kind.INT, nullable=False),
        Column("state", Kind.STRING, nullable=True),
        Column("amount", Kind.DECIMAL, nullable=True, precision=10, scale=2),
    ),
    ("id",),
)
ITEMS = SourceSchema(
    "shop.items",
    (Column("id", Kind.INT, nullable=False), Column("name", Kind.STRING, nullable=True)),
    ("id",),
)
SCHEMAS = [ORDERS, ITEMS]

Change = tuple[str, SourceSchema, int, str | None]


def window(
    scn: int, *changes: Change, first_seq: int = 0, txid: str = "", dump: bool = False
) -> bytes:
    """One window: changes are (op letter, schema, id, text or None)."""
    builder = WindowBuilder(scn, 1_700_000_000_000_000 + scn * 1000, first_seq)
    for op, schema, key, text in changes:
        add(builder, op, schema, key, text)
    return builder.end(txid or f"tx{scn}", dump=dump)


def add(builder: WindowBuilder, op: str, schema: SourceSchema, key: int, text: str | None) -> None:
    """One change at the end of a window that is being built."""
    number = {"c": Op.INSERT, "u": Op.UPDATE, "d": Op.DELETE, "r": Op.READ, "t": Op.TRUNCATE}[op]
    if number is Op.TRUNCATE:
        builder.event(number, schema.source_id, schema.fingerprint, b"")
        return
    builder.event(
        number,
        schema.source_id,
        schema.fingerprint,
        schema.encode_key([key]),
        after=None if number is Op.DELETE else schema.encode_row(row(schema, key, text)),
    )


def row(schema: SourceSchema, key: int, text: str | None) -> dict[str, object]:
    """The row that a change of ``key`` to ``text`` leaves."""
    if schema is ORDERS:
        return {"id": key, "state": text, "amount": None}
    return {"id": key, "name": text}


def orders(scn: int, *ids: int, op: str = "c") -> bytes:
    """One window with an order for each id."""
    return window(scn, *[(op, ORDERS, key, f"s{scn}") for key in ids])
