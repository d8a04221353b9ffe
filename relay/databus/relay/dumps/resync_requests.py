"""``/v1/{db}/tables``: requests about tables that are not followed."""

from __future__ import annotations

import json
from typing import Any

from databus.common.errors import BadRequest, from_answer
from databus.common.table_state import TableState, decode_table_state
from databus.relay.dumps.resync import Resync
from databus.relay.sources.contract import RelayingSource

ACTIONS = ("present", "resync", "claim", "done", "give_up")
_KEYS = ("action", "source", "by", "sources", "reason", "is_operator", "for_good")


def change_table(tables: Resync, document: dict[str, Any]) -> dict[str, Any]:
    """Do what a request describes; the answer to a question has ``granted``.

    ``present``: the bootstrap server ``by`` repairs tables that match ``sources``.  ``resync``: an
    operator confirms that ``source`` is to be resynchronised.  ``claim``: ``by`` is about to
    compare and repair it; then ``done`` or ``give_up``, with ``reason``.  Its answer has
    ``returned``, the columns whose values are to be sent even where the copy has them.

    Raises:
        BadRequest: a key is unknown or its value not of its form; ``resync`` of a table that is
            followed.
    """
    unknown = sorted(set(document) - set(_KEYS))
    if unknown:
        raise BadRequest(f"unknown key {unknown[0]!r}; known are {', '.join(_KEYS)}")
    action = document.get("action")
    if action not in ACTIONS:
        raise BadRequest(f"action is {action!r}; known are {', '.join(ACTIONS)}")
    by = _text(document, "by") if action != "resync" else ""
    if action == "present":
        patterns = document.get("sources", [])
        if not isinstance(patterns, list) or not all(isinstance(one, str) for one in patterns):
            raise BadRequest(f"sources is {patterns!r}; give a list of globs such as ['shop.*']")
        tables.present(by, patterns)
        return {}
    source = _text(document, "source")
    if action == "resync":
        tables.confirm(source)
        return {}
    if action == "claim":
        granted = tables.claim(source, by, is_operator=document.get("is_operator") is True)
        record = tables.book.get(source)
        return {"granted": granted, "returned": record.returned if record else []}
    if action == "done":
        return {"granted": tables.done(source, by)}
    tables.give_up(
        source, by, str(document.get("reason", "")), for_good=document.get("for_good") is True
    )
    return {}


async def states_of(parent: RelayingSource) -> list[TableState]:
    """The tables that a chained relay's parent does not follow; none if it is too old to report.

    Raises:
        DatabusError: it does not answer.
    """
    status, body = await parent.forward("GET", "/tables", b"")
    if status == 404:
        return []
    if status >= 400:
        raise from_answer("the parent", status, body)
    return [decode_table_state(json.dumps(one).encode()) for one in json.loads(body)["tables"]]


def _text(document: dict[str, Any], name: str) -> str:
    value = document.get(name)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{name} is {value!r}; give a name")
    return value
