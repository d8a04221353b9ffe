"""What ``check``, ``dump`` and ``status`` ask, and how the answers look."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from databus.cli.web import call, split_database
from databus.common.config import Config, DatabaseConfig
from databus.common.errors import (
    BadRequest,
    DatabusError,
    DumpFailed,
    PreflightFailed,
    ServerUnavailable,
)
from databus.common.table_state import CaptureState

_ENDED = ("completed", "failed", "cancelled")
_POLL_S = 0.3
_GIVE_UP_S = 60.0


async def check(config: Config) -> None:
    """Run each database's preflight and print what it finds.

    Raises:
        PreflightFailed: a finding forbids capture.
    """
    from databus.relay.sources.catalogue import create_source
    from databus.relay.sources.ruled import RuledSource

    console = Console(soft_wrap=True)
    failed = []
    if not config.database:
        console.print("the file is good; it has no [[database]] to examine", markup=False)
    for database in config.database:
        source = create_source(database)
        tables: dict[str, str] = {}
        try:
            findings = await source.preflight()
            if isinstance(source, RuledSource) and not any(f.fatal for f in findings):
                tables = await source.effective_columns()
        finally:
            await source.close()
        for finding in findings:
            colour = "red" if finding.fatal else "yellow"
            console.print(f"[{colour}]{database.name}[/]: {escape(str(finding))}", highlight=False)
        for name, columns in tables.items():
            console.print(f"{database.name}: {name}: {columns}", markup=False, highlight=False)
        for line in _not_followed(config, database):
            console.print(f"[yellow]{database.name}[/]: {escape(line)}", highlight=False)
        if any(finding.fatal for finding in findings):
            failed.append(database.name)
        else:
            console.print(
                f"[green]{database.name}[/]: ready ({escape(str(database.url))})", highlight=False
            )
    if failed:
        raise PreflightFailed(f"not ready for capture: {', '.join(failed)}")


def _not_followed(config: Config, database: DatabaseConfig) -> Iterator[str]:
    """The tables that the relay on this machine does not follow, as it last recorded them."""
    from databus.relay.layout import DatabaseFolder
    from databus.relay.table_records import TableBook, shown

    if config.relay is None:
        return
    for record in TableBook(DatabaseFolder.of(config.relay.data_dir, database.name).tables):
        table = shown(record, database.name, is_automatic=database.resync == "auto")
        if table.state != CaptureState.FOLLOWED:
            yield f"{table.source} is {table.state} since scn {table.since_scn}: {table.reason}"
            yield f"{table.source}: {table.cure}"


def start_dump(url: str, sources: str, options: dict[str, Any], *, wait: bool) -> None:
    """Start a dump and, unless told otherwise, show its progress until it ends.

    Raises:
        DumpFailed: it ended without having read everything.
    """
    base, database = split_database(url)
    body = {name: value for name, value in options.items() if value is not None}
    body["sources"] = [part.strip() for part in sources.split(",") if part.strip()]
    dump = call(f"{base}/v1/{database}/dumps", method="POST", body=body)
    if not wait:
        print(dump["id"])
        return
    _watch(f"{base}/v1/{database}/dumps/{dump['id']}", dump)


def watch_dump(url: str, dump: str) -> None:
    """Show the progress of a dump that was started before.

    Raises:
        DumpFailed: it ended without having read everything.
    """
    base, database = split_database(url)
    place = f"{base}/v1/{database}/dumps/{dump}"
    _watch(place, call(place))


def _watch(place: str, dump: dict[str, Any]) -> None:
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[pace]}"),
        TimeElapsedColumn(),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=None, pace="")
        while dump["state"] not in _ENDED:
            progress = dump.get("progress") or {}
            bar.update(
                task,
                description=_dump_line(dump),
                total=progress.get("estimated_rows") or None,
                completed=progress.get("rows_read", dump["rows"]),
                pace=_pace(progress),
            )
            time.sleep(_POLL_S)
            dump = _asked_until_answered(place)
    print(_dump_line(dump))
    missing = dump.get("missing") or []
    if missing:
        others = f" and {len(missing) - 10} others" if len(missing) > 10 else ""
        print(f"no row has the key {', '.join(map(str, missing[:10]))}{others}")
    if dump["state"] != "completed":
        raise DumpFailed(f"dump {dump['id']} is {dump['state']}: {dump.get('error')}")


def _asked_until_answered(place: str) -> dict[str, Any]:
    """The dump; a relay that does not answer, as while its worker starts anew, is asked again.

    Raises:
        ServerUnavailable: it has not answered for ``_GIVE_UP_S``.
    """
    deadline_s = time.monotonic() + _GIVE_UP_S
    while True:
        try:
            return call(place)
        except DatabusError as error:
            if not error.retry:
                raise
            if time.monotonic() >= deadline_s:
                dumps, _, dump = place.rpartition("/dumps/")
                raise ServerUnavailable(
                    f"{error.message}; it has been asked for {_GIVE_UP_S:g} s. The dump goes on "
                    f"when its relay does; look at it with: databus dump "
                    f"{dumps.replace('/v1/', '/')} --watch {dump}"
                ) from error
        time.sleep(_POLL_S)


def _pace(progress: dict[str, Any]) -> str:
    rate, eta_s = progress.get("rows_per_s"), progress.get("eta_s")
    left = "" if eta_s is None else f", {int(eta_s) // 60}:{int(eta_s) % 60:02d} left"
    return "" if rate is None else f"{rate:,.0f} rows/s{left}"


def list_dumps(url: str) -> None:
    """Print all dumps, the latest last."""
    base, database = split_database(url)
    for dump in call(f"{base}/v1/{database}/dumps")["dumps"]:
        print(_dump_line(dump))


def key_list(text: str) -> list[Any]:
    """The keys that somebody has written as JSON.

    Raises:
        BadRequest: it is none.
    """
    try:
        keys = json.loads(text)
    except ValueError as error:
        raise BadRequest(f"--keys {text!r} is no JSON: {error}") from None
    if not isinstance(keys, list):
        raise BadRequest(f"--keys {text!r} is no list")
    return keys


def change_dump(url: str, dump: str, state: str, pace: dict[str, int | None]) -> None:
    """Pause or resume a dump, perhaps at another pace."""
    base, database = split_database(url)
    body = {"state": state} | {name: value for name, value in pace.items() if value is not None}
    print(_dump_line(call(f"{base}/v1/{database}/dumps/{dump}", method="PATCH", body=body)))


def cancel_dump(url: str, dump: str) -> None:
    """Give a dump up; rows that it has sent stay sent."""
    base, database = split_database(url)
    call(f"{base}/v1/{database}/dumps/{dump}", method="DELETE")
    print(f"{dump} cancelled")


def _dump_line(dump: dict[str, Any]) -> str:
    sources = ", ".join(dump["sources"]) or "-"
    error = dump.get("error")
    text = f"{dump['id']} {dump['state']}: {dump['rows']:,} rows in {dump['chunks']:,} chunks of "
    waits_for = (dump.get("progress") or {}).get("waits_for")
    why = _error_text(error) if error else waits_for and f"waits for the stream: {waits_for}"
    return text + sources + (f" ({why})" if why else "")


def _error_text(error: Any) -> str:
    return str(error.get("detail", error)) if isinstance(error, dict) else str(error)


def status(urls: Iterable[str], *, as_json: bool) -> None:
    """Print the state of each server that answers.

    Raises:
        DatabusError: one does not; the others have been printed.
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
    """Of a relay's status, and of a bootstrap server's."""
    for database in document.get("databases", []):
        named = database.get("suspended") or {}
        tables = [*database.get("tables", []), *({"source": n, **named[n]} for n in named)]
        for one in tables:
            yield (
                f"{database['name']}: {one['source']} is {one['state']} since scn "
                f"{one['since_scn']}: {one['reason']}. {one['cure']}"
            )


def resync(url: str, source: str) -> None:
    """Have a suspended table resynchronised now.

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
