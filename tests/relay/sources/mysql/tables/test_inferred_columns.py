"""Which statements can have changed a table, and what is believed of it."""

from __future__ import annotations

from typing import Any

import pytest

from databus.relay.sources.mysql.gtid.mysql_lineage import (
    MySqlResumeState,
    RestoredState,
    decode_resume_state,
)
from databus.relay.sources.mysql.protocol.binlog_events import TableMap
from databus.relay.sources.mysql.rows.charsets import Charset, Charsets
from databus.relay.sources.mysql.rows.uncertain_table import TableUncertain
from databus.relay.sources.mysql.statements import Statement
from databus.relay.sources.mysql.tables.inferred_columns import InferredColumns, LookaheadResult
from databus.relay.sources.mysql.tables.mapped_table import resolve_nameless
from databus.relay.sources.mysql.tables.mysql_tables import MySqlTable, MySqlTableColumn

CHARSETS = Charsets({45: Charset("utf8mb4", 4), 63: Charset("binary", 1)})
ORDERS = MySqlTable(
    "shop",
    "orders",
    "InnoDB",
    (
        MySqlTableColumn("id", "int unsigned", False, "", ""),
        MySqlTableColumn("state", "enum('a','it''s')", True, "utf8mb4", "utf8mb4_bin"),
        MySqlTableColumn("note", "varchar(5)", True, "utf8mb4", "utf8mb4_bin"),
    ),
    ("id",),
)
ITEMS = MySqlTable("shop", "items", "InnoDB", ORDERS.columns, ("id",))
ALTER = Statement("shop", "ALTER TABLE orders ADD x INT")


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("ALTER TABLE orders ADD x INT", True),
        ("alter table SHOP.`Orders` add x int", True),
        ("RENAME TABLE a TO orders", True),
        ("DROP TABLE IF EXISTS /* all */ a,orders", True),
        ("DROP DATABASE shop", True),
        ("drop /* why */ schema shop", True),
        ("CREATE DATABASE shop", False),
        ("ALTER TABLE orders_2 ADD x INT", False),
        ("ALTER TABLE shop.other ADD x INT", False),
        ("ALTER TABLE \N{REPLACEMENT CHARACTER}a ADD x INT", True),
    ],
)
def test_a_statement_may_change_the_tables_that_it_names(text: str, changes: bool) -> None:
    assert Statement("shop", text).may_change("shop", "orders") is changes


@pytest.mark.parametrize("text", ["ALTER TABLE `a-b` ADD x INT", 'alter table "A-B" add x int'])
def test_a_name_that_is_no_word_is_found_too(text: str) -> None:
    assert Statement("shop", text).may_change("shop", "a-b")
    assert not Statement("shop", text).may_change("shop", "a-c")
    assert Statement("shop", "DROP TABLE `a``-`").may_change("shop", "a`-")


@pytest.mark.parametrize(
    "text", ["BEGIN", "COMMIT", "SAVEPOINT orders", "XA START 'orders'", "TRUNCATE orders"]
)
def test_some_statements_change_no_definition(text: str) -> None:
    assert Statement("shop", text).changes_nothing
    assert not ALTER.changes_nothing


def test_a_table_is_believed_until_a_statement_names_it() -> None:
    inferred = InferredColumns()
    assert not inferred.is_needed
    lookahead = LookaheadResult({"shop.orders": ORDERS, "shop.items": ITEMS}, (ALTER,))
    with pytest.raises(TableUncertain, match="ALTER TABLE orders ADD x INT"):
        inferred.learn("shop.orders", lookahead)
    with pytest.raises(TableUncertain, match="it was dropped"):
        inferred.learn("shop.gone", lookahead)
    assert inferred.learn("shop.items", lookahead) == ITEMS
    assert (inferred.get("shop.items"), inferred.get("shop.orders")) == (ITEMS, None)
    assert not inferred.forget(ALTER)
    inferred.learn_named(ALTER, LookaheadResult(lookahead.catalogue, ()))
    assert inferred.get("shop.orders") == ORDERS
    assert inferred.forget(ALTER)
    assert dict(inferred.tables) == {"shop.items": ITEMS}


def test_inferred_columns_are_stored_and_restored_at_any_position() -> None:
    inferred = InferredColumns()
    inferred.learn("shop.orders", LookaheadResult({"shop.orders": ORDERS}, ()))
    resume_state = decode_resume_state(
        MySqlResumeState(9, inferred=inferred.encode(), inferred_scn=9).encode()
    )
    for after_scn in (8, 9, 12):
        restored = RestoredState(after_scn, None, resume_state).resume_state(after_scn)
        again = InferredColumns(restored.inferred_scn, restored.inferred)
        assert (again.since_scn, again.is_needed, again.get("shop.orders")) == (9, True, ORDERS)
    assert decode_resume_state('{"scn": 1, "mark": null, "prepared": null}').inferred == ""


def table_map(**changes: Any) -> TableMap:
    found: dict[str, Any] = {
        "table_id": 1,
        "schema": "shop",
        "table": "orders",
        "types": bytes([3, 247, 15]),
        "metas": (0, 247 << 8 | 1, 20),
        "nullable": (False, True, True),
        "unsigned": (),
        "collations": (0, 0, 0),
        "names": (),
        "members": (),
        "primary_key": (),
    }
    return TableMap(**{**found, **changes})


def test_the_definition_gives_names_signs_labels_and_key() -> None:
    mapped = resolve_nameless(table_map(), b"", ORDERS, CHARSETS, "error")
    assert mapped.schema == ORDERS.source_schema("error")
    assert mapped.key_indices == (0,)
    assert mapped.columns[1].members == ("a", "it's")
    body = bytes([3, 0xFF, 0]) + (2**32 - 1).to_bytes(4, "little") + b"\2" + b"\2hi"
    assert next(mapped.rows(memoryview(body), 0, update=False))[0] == (2**32 - 1, "it's", "hi")


@pytest.mark.parametrize(
    "changes",
    [
        {"types": bytes([8, 247, 15])},
        {"metas": (0, 247 << 8 | 1, 40)},
        {"nullable": (True, True, True)},
        {"unsigned": (False, False, False)},
        {"collations": (0, 0, 63)},
        {
            "types": bytes([3, 247]),
            "metas": (0, 247 << 8 | 1),
            "nullable": (False, True),
            "collations": (0, 0),
        },
    ],
)
def test_a_table_map_that_does_not_agree_with_the_definition_is_none_of_it(
    changes: dict[str, object],
) -> None:
    with pytest.raises(TableUncertain, match=r"shop\.orders"):
        resolve_nameless(table_map(**changes), b"", ORDERS, CHARSETS, "error")
