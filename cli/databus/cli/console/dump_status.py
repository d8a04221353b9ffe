"""The requests of ``databus dump`` to a relay, and their answers as text."""

from __future__ import annotations

import json
import time
from typing import Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from databus.cli.console.http_client import call, split_database
from databus.common.errors import (
    BadRequest,
    DatabusError,
    DumpFailed,
    ServerUnavailable,
)

_ENDED = ("completed", "failed", "cancelled")
_POLL_S = 0.3
_GIVE_UP_S = 60.0


def start_dump(url: str, sources: str, options: dict[str, Any], *, wait: bool) -> None:
    """Start a dump and, with ``wait``, show its progress until it ends.

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
    dump_url = f"{base}/v1/{database}/dumps/{dump}"
    _watch(dump_url, call(dump_url))


def _watch(dump_url: str, dump: dict[str, Any]) -> None:
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
            dump = _retried_call(dump_url)
    print(_dump_line(dump))
    missing = dump.get("missing") or []
    if missing:
        others = f" and {len(missing) - 10} others" if len(missing) > 10 else ""
        print(f"no row has the key {', '.join(map(str, missing[:10]))}{others}")
    if dump["state"] != "completed":
        raise DumpFailed(f"dump {dump['id']} is {dump['state']}: {dump.get('error')}")


def _retried_call(dump_url: str) -> dict[str, Any]:
    """The dump; the call is repeated while the relay does not answer, as while a worker restarts.

    Raises:
        ServerUnavailable: the relay has not answered for ``_GIVE_UP_S``.
    """
    deadline_s = time.monotonic() + _GIVE_UP_S
    while True:
        try:
            return call(dump_url)
        except DatabusError as error:
            if not error.retry:
                raise
            if time.monotonic() >= deadline_s:
                dumps, _, dump = dump_url.rpartition("/dumps/")
                raise ServerUnavailable(
                    f"{error.message}; the command tried for {_GIVE_UP_S:g} s. The dump continues "
                    f"when its relay runs again; show it with: databus dump "
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
    """The keys of ``--keys``, a list in JSON.

    Raises:
        BadRequest: the text is not a JSON list.
    """
    try:
        keys = json.loads(text)
    except ValueError as error:
        raise BadRequest(f"--keys {text!r} is not JSON: {error}") from None
    if not isinstance(keys, list):
        raise BadRequest(f"--keys {text!r} is not a list")
    return keys


def change_dump(url: str, dump: str, state: str, pace: dict[str, int | None]) -> None:
    """Pause or resume a dump, perhaps at another pace."""
    base, database = split_database(url)
    body = {"state": state} | {name: value for name, value in pace.items() if value is not None}
    print(_dump_line(call(f"{base}/v1/{database}/dumps/{dump}", method="PATCH", body=body)))


def cancel_dump(url: str, dump: str) -> None:
    """Cancel a dump; rows that it has sent stay in the stream."""
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
