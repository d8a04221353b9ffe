"""``databus schema``: the columns of a source, as a table, JSON and Python."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from databus.client.application.row_models import model_code
from databus.common.frame.frame_format import Op
from tests.support.live_relay import ORDERS, LiveRelay, window


@pytest.mark.processes
async def test_a_source_is_printed_as_columns_json_and_python(tmp_path: Path) -> None:
    live = LiveRelay(tmp_path)
    live.append(window(1, [(Op.INSERT, ORDERS, 1)]))
    async with live.served():

        async def run(*words: str) -> tuple[int | None, str, str]:
            process = await asyncio.create_subprocess_exec(
                Path(sys.executable).with_name("databus"), "schema", *words, "--relay", live.url,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, err = await process.communicate()
            return process.returncode, out.decode(), err.decode()

        shown, as_json, as_python, as_model, wrong, missing = await asyncio.gather(
            run(ORDERS.source),
            run(ORDERS.source, "--json"),
            run(ORDERS.source, "--python"),
            run(ORDERS.source, "--python", "--form", "pydantic", "--database", "shop"),
            run(ORDERS.source, "--python", "--form", "class"),
            run("shop.none"),
        )
    live.close()
    lines = shown[1].splitlines()
    assert [line.split()[0] for line in lines] == [column.name for column in ORDERS.columns]
    assert lines[0].endswith("not null key")
    assert json.loads(as_json[1]) == ORDERS.to_json()
    assert as_python[1] == model_code(ORDERS, "dataclass")
    assert as_model[1] == model_code(ORDERS, "pydantic")
    assert wrong[0] == 2
    assert "is not one of dataclass, typeddict, pydantic" in wrong[2]
    assert missing[0] == 1
    assert "has no schema of shop.none (shop)" in missing[2]
