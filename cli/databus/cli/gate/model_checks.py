"""Classes of an application (``event.as_``) against a new definition: made from sample rows."""

from __future__ import annotations

import datetime as dt
import importlib
import sys
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from databus.cli.gate.gate_findings import FindingKind, GateFinding
from databus.cli.gate.table_effects import TableEffect
from databus.client.application.row_models import row_as
from databus.common.errors import BadRequest, UsageError
from databus.common.schema.source_schema import Kind, SourceSchema

_DAY = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
_SAMPLES: dict[Kind, Any] = {
    Kind.BOOL: True,
    Kind.INT: 1,
    Kind.UINT64: 1,
    Kind.FLOAT: 1.5,
    Kind.DECIMAL: Decimal("1.5"),
    Kind.NUMERIC: Decimal("1.5"),
    Kind.STRING: "text",
    Kind.BYTES: b"\xff",
    Kind.DATE: _DAY.date(),
    Kind.TIME: _DAY.time(),
    Kind.TIME_SPAN: dt.timedelta(hours=-1),
    Kind.TIMESTAMP: _DAY.replace(tzinfo=None),
    Kind.TIMESTAMPTZ: _DAY,
    Kind.UUID: uuid.UUID(int=1),
    Kind.JSON: "{}",
}


def model_check(text: str) -> Callable[[TableEffect], Iterator[GateFinding]]:
    """The check of ``SOURCE=MODULE:CLASS``.

    Raises:
        BadRequest: there is no such class.
    """
    source, _, name = text.partition("=")
    module, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        model = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadRequest(f"--model {text!r} is not SOURCE=MODULE:CLASS: {error}") from None
    finally:
        sys.path.pop(0)

    def check(effect: TableEffect) -> Iterator[GateFinding]:
        if effect.source != source or effect.before is None or effect.after is None:
            return
        before, after = _misfits(model, effect.before), _misfits(model, effect.after)
        for why in after:
            if why not in before:
                yield GateFinding(
                    FindingKind.CONSUMER,
                    f"class {name}",
                    why,
                    "deploy a class that takes both versions before the migration",
                )

    return check


def _misfits(model: type[Any], schema: SourceSchema) -> list[str]:
    """Why rows of a definition are no objects of a class: one with values, one with nulls."""
    whole = {column.name: _SAMPLES[column.kind] for column in schema.columns}
    nulls = {column.name: None for column in schema.columns if column.nullable}
    found = []
    for row in (whole, whole | nulls):
        try:
            row_as(model, row, f"a row of {schema.source}", frozenset())
        except UsageError as error:
            if error.message not in found:
                found.append(error.message)
    return found
