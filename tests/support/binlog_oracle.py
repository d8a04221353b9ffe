"""Rows of a binlog as python-mysql-replication reads them, in the form in which our consumers see
them."""

from __future__ import annotations

import datetime as dt
import json
import random
import re
import uuid
from collections.abc import Callable, Mapping
from decimal import Decimal
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from pymysqlreplication import BinLogStreamReader
from pymysqlreplication.constants.NONE_SOURCE import (
    EMPTY_SET,
    OUT_OF_DATE_RANGE,
    OUT_OF_DATETIME2_RANGE,
)
from pymysqlreplication.row_event import DeleteRowsEvent, UpdateRowsEvent, WriteRowsEvent

from databus.cli.demo.private_servers import PASSWORD, USER
from tests.support.fixtures import FreshDatabase

Row = dict[str, Any]
Change = tuple[str, Row | None, Row | None]
"""Table, before, after."""
Types = Mapping[str, str]
"""The columns' types as they were declared; ``id`` is not among them."""

LAST = "the_last"
"""The table whose first row ends the reading."""

NO_DATE = object()
"""What the library has for a date that no calendar has."""


def _is_less_by_a_fraction(value: Any) -> bool:
    return isinstance(value, dt.timedelta) and value.days < 0 and bool(value.microseconds)


REFUSED = ("vector", "vector(3)", "varchar(20) character set utf16")
"""Types that the library ends at, and so reads nothing of their table: the signs of vectors are
a column too many in its metadata, and big-endian UTF-16 is read as little-endian."""


def _is_no_date(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        dt.datetime.fromisoformat(value)
    except ValueError:
        return True
    return False


MISREAD: list[tuple[str, Callable[[Any], bool], str]] = [
    (r"time\(", _is_less_by_a_fraction, "it adds the fraction of a time below zero"),
    (r"enum.* latin1$", lambda value: value == "é", "it drops labels that are not UTF-8"),
    (r".* sjis$", lambda value: "\\" in (value or ""), "it takes a backslash for a wide one"),
    (r"json$", lambda value: value == "null", "JSON's null is None, as NULL is"),
    (r"date", _is_no_date, "it has None for a date with zeros in it"),
    (r"timestamp", lambda value: str(value)[:4] in ("0000", "None"), "a moment of zeros is 1970"),
    (r"vector|.* utf16$", lambda value: True, "it refuses the table"),
]
"""By type and our value: what the library reads wrongly, and why. The server itself is read."""


def is_misread(column_type: str, ours: Any) -> bool:
    """Whether the library is known to be wrong about such a value."""
    return any(re.match(pattern, column_type) and holds(ours) for pattern, holds, _ in MISREAD)


def is_doubtful(column_type: str) -> bool:
    """Whether there are values of this type that the library misreads or refuses."""
    return any(re.match(pattern, column_type) for pattern, _, _ in MISREAD)


def position_of(database: FreshDatabase) -> dict[str, Any]:
    """Where the server's binlog ends now, as the library needs it.

    On MySQL by its file and offset: the library refuses GTIDs with a tag, which other tests leave
    there.
    """
    if database.url.startswith("mysql"):
        file, offset, *_ = database.execute("SHOW BINARY LOG STATUS")[0]
        return {"log_file": file, "log_pos": offset, "resume_stream": True}
    gtids = database.execute("SELECT @@gtid_binlog_pos")[0][0]
    return {"auto_position": gtids, "is_mariadb": True}


def changes_read_by_the_other(
    database: FreshDatabase, after: dict[str, Any], types: Types, *, without: tuple[str, ...] = ()
) -> list[Change]:
    """What the library reads behind a position, up to the row in ``LAST``.

    ``without`` are tables that it refuses. A server that is set not to keep its reader waiting
    closes the connection at the end of the log, and what was still on its way is lost: so this
    waits for the last row.
    """
    reader = BinLogStreamReader(
        connection_settings={
            "host": "127.0.0.1",
            "port": database.server.port,
            "user": USER,
            "password": PASSWORD,
        },
        server_id=random.randrange(10**6, 10**9),
        only_events=[WriteRowsEvent, UpdateRowsEvent, DeleteRowsEvent],
        only_schemas=[database.name],
        ignored_tables=list(without),
        blocking=True,
        enable_logging=False,
        **after,
    )
    found: list[Change] = []
    try:
        for event in reader:
            if event.table == LAST:
                return found
            for row in event.rows:
                found.extend(_changes(event, row, types))
    finally:
        reader.close()
    raise AssertionError(f"the library's reader ended before a row of {LAST}")


def _changes(event: Any, row: dict[str, Any], types: Types) -> list[Change]:
    """The row's change; two where it moves to another key, as in our stream."""
    if isinstance(event, UpdateRowsEvent):
        before = _image(row["before_values"], row["before_none_sources"], types)
        after = _image(row["after_values"], row["after_none_sources"], types)
        if before["id"] != after["id"]:
            return [(event.table, before, None), (event.table, None, after)]
        return [(event.table, before, after)]
    image = _image(row["values"], row["none_sources"], types)
    pair = (None, image) if isinstance(event, WriteRowsEvent) else (image, None)
    return [(event.table, *pair)]


def _image(values: Row, none_sources: dict[str, str], types: Types) -> Row:
    return {
        name: _as_ours(types.get(name, "int"), value, none_sources.get(name))
        for name, value in values.items()
    }


def _as_ours(column_type: str, value: Any, none_source: str | None) -> Any:
    """The library's value in the form that ``comparable`` gives to ours."""
    if value is None:
        if none_source in (OUT_OF_DATE_RANGE, OUT_OF_DATETIME2_RANGE):
            return NO_DATE
        return "" if none_source == EMPTY_SET else None
    word = column_type.partition(" ")[0].partition("(")[0]
    forms: dict[str, Callable[[], Any]] = {
        "set": lambda: ",".join(label for label in _labels(column_type) if label in value),
        "year": lambda: 0 if value == 1900 else value,
        "bit": lambda: int(value, 2),
        "timestamp": lambda: value.replace(tzinfo=dt.UTC),
        "binary": lambda: _padded(value, int(re.findall(r"\d+", column_type)[0])),
        **dict.fromkeys(_UNPADDED, lambda: _padded(value, 0)),
        "uuid": lambda: uuid.UUID(bytes=_padded(value, 16)),
        "inet4": lambda: IPv4Address(_padded(value, 4)),
        "inet6": lambda: IPv6Address(_padded(value, 16)),
        "json": lambda: value if isinstance(value, str) else json.dumps(_json(value)),
        "float": lambda: repr(value),
        "double": lambda: repr(value),
        "real": lambda: repr(value),
    }
    return forms[word]() if word in forms else value


_UNPADDED = ("varbinary", "tinyblob", "blob", "mediumblob", "longblob")


def _labels(column_type: str) -> list[str]:
    return re.findall(r"'((?:[^']|'')*)'", column_type)


def _padded(value: bytes | str, byte_count: int) -> bytes:
    """With the zeros that the binlog leaves out; of no byte at all the library makes a text."""
    found = value if isinstance(value, bytes) else value.encode()
    return found.ljust(byte_count, b"\0")


def _json(value: Any) -> Any:
    """With texts for the bytes that the library leaves as they are."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, list):
        return [_json(member) for member in value]
    if isinstance(value, dict):
        return {key.decode(): _json(member) for key, member in value.items()}
    return value


def comparable(column_type: str, ours: Any, theirs: Any) -> Any:
    """Our value in the form that ``_as_ours`` gives to the library's."""
    if ours is None:
        return None
    if isinstance(theirs, dt.datetime) and isinstance(ours, str):
        return dt.datetime.fromisoformat(ours).replace(tzinfo=theirs.tzinfo)
    if isinstance(theirs, dt.date) and isinstance(ours, str):
        return dt.date.fromisoformat(ours)
    if column_type.startswith("inet"):
        return ip_address(ours)
    if column_type == "json" and ours != theirs:
        return json.dumps(json.loads(ours))
    return repr(ours) if isinstance(ours, float) else ours
