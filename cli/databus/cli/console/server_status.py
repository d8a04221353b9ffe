"""The state of relays and bootstrap servers, as tables; the resynchronisation of a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from databus.cli.console.http_client import call, split_database
from databus.common.errors import (
    DatabusError,
    ServerUnavailable,
)


def status(urls: Iterable[str], *, as_json: bool) -> None:
    """Print the state of each server that answers.

    Raises:
        DatabusError: one does not answer; the others have been printed.
    """
    failures = []
    for url in urls:
        try:
            document = call(f"{url.rstrip('/')}/v1/status")
        except DatabusError as error:
            failures.append(error)
            continue
        if as_json:
            print(json.dumps({"url": url, **document}))
        else:
            Console().print(_status_table(url, document))
            for line in _tables_not_followed(document):
                Console(soft_wrap=True).print(line, markup=False)
    if failures[1:]:
        raise ServerUnavailable("; ".join(failure.message for failure in failures))
    if failures:
        raise failures[0]


def _status_table(url: str, document: dict[str, Any]) -> Table:
    table = Table(title=url, title_justify="left")
    for column in ("database", "state", "oldest", "newest", "lag", "more"):
        table.add_column(column, no_wrap=column != "more")
    for database in document.get("databases", []):
        table.add_row(*map(escape, _status_row(database)))
    return table


def _tables_not_followed(document: dict[str, Any]) -> Iterator[str]:
    """A line for each such table in the status of a relay or a bootstrap server."""
    for database in document.get("databases", []):
        named = database.get("suspended") or {}
        tables = [*database.get("tables", []), *({"source": n, **named[n]} for n in named)]
        for one in tables:
            yield (
                f"{database['name']}: {one['source']} is {one['state']} since scn "
                f"{one['since_scn']}: {one['reason']}. {one['cure']}"
            )


def resync(url: str, source: str) -> None:
    """Make the relay resynchronise a suspended table now.

    Raises:
        DatabusError: the relay does not answer, or the table is followed.
    """
    base, database = split_database(url)
    body = {"action": "resync", "source": source}
    answer = call(f"{base}/v1/{database}/tables", method="POST", body=body)
    state = next((one for one in answer["tables"] if one["source"] == source), None)
    print(f"{source}: {state['state'] if state else 'followed'}")


_SHOWN = ("name", "state", "prev", "min", "max", "lag_us", "clock", "url")


def _status_row(database: dict[str, Any]) -> tuple[str, ...]:
    lag = database.get("lag_us")
    more = {
        name: _position(value) if isinstance(value, dict) else value
        for name, value in database.items()
        if name not in _SHOWN
        and not name.endswith("_commit_us")
        and (isinstance(value, str | int | float) or (isinstance(value, dict) and "scn" in value))
    }
    return (
        database["name"],
        str(database.get("state", "")),
        _position(database.get("prev")),
        _position(database.get("max")),
        "-" if lag is None else f"{lag / 1e6:.3f} s",
        ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in more.items()),
    )


def _position(position: Any) -> str:
    return f"{position['scn']}:{position.get('seq', 'end')}" if position else "-"
