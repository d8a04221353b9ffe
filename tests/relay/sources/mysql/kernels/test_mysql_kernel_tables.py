"""The plan of mapped tables: each one is found, and thousands do not make it again each time."""

from __future__ import annotations

import pytest

from databus.relay.sources.mysql.kernels import kernel_cells as c
from databus.relay.sources.mysql.kernels.mysql_kernel_tables import MySqlKernelTables


def found(tables: MySqlKernelTables, table_id: int) -> tuple[int, bytes] | None:
    """Mode and body of a table, as the kernel looks for it."""
    plan = tables.plan.tolist()
    slot = table_id & plan[c.SLOT_MASK]
    while line := plan[plan[c.AT_SLOTS] + slot]:
        if plan[line + c.T_ID] == table_id:
            at = plan[line + c.T_BODY]
            body = tables.blob[at : at + plan[line + c.T_BODY_BYTES]].tobytes()
            return plan[line + c.T_MODE], body
        slot = (slot + 1) & plan[c.SLOT_MASK]
    return None


@pytest.mark.parametrize("step", [1, 64])
def test_thousands_of_tables_are_found_and_few_of_them_make_a_new_plan(step: int) -> None:
    tables = MySqlKernelTables()
    plans = [tables.plan]
    for number in range(3000):
        tables.add(1 + step * number, b"body %d" % number, None)
        if tables.plan is not plans[-1]:
            plans.append(tables.plan)
    assert len(plans) <= 10
    for number in (0, 1, 15, 16, 17, 1500, 2998, 2999):
        assert found(tables, 1 + step * number) == (c.MODE_SKIP, b"body %d" % number)
    assert found(tables, 1 + step * 3000) is None


def test_a_new_definition_replaces_the_table_of_its_id() -> None:
    tables = MySqlKernelTables()
    for number in range(20):
        tables.add(number + 1, b"first", None)
    tables.add(7, b"second", None, for_decoder=True)
    assert found(tables, 7) == (c.MODE_PYTHON, b"second")
    assert found(tables, 8) == (c.MODE_SKIP, b"first")
    tables.clear()
    assert found(tables, 8) is None
