"""Transactions of a binlog as python-mysql-replication reads them.

The library shares no code with our decoders.  It does not read every event and every type; such
values are marked and do not count as differences.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pymysql
from pymysqlreplication import BinLogStreamReader, exceptions
from pymysqlreplication.constants.NONE_SOURCE import NULL
from pymysqlreplication.event import (
    GtidEvent,
    HeartbeatLogEvent,
    MariadbGtidEvent,
    NotImplementedEvent,
    QueryEvent,
    XAPrepareEvent,
    XidEvent,
)
from pymysqlreplication.row_event import DeleteRowsEvent, UpdateRowsEvent, WriteRowsEvent

from databus.common.errors import SourceUnavailable, UnsupportedChange
from databus.common.schema.source_names import join_source
from databus.relay.sources.mysql.protocol.binlog_events import EventType
from databus.relay.sources.mysql.protocol.compressed_events import PLAIN_ROWS
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings

_SILENCE_S = 30
_HEARTBEAT_S = 5
_COMPRESSED = {EventType.TRANSACTION_PAYLOAD, EventType.QUERY_COMPRESSED, *PLAIN_ROWS}
_REFUSALS: tuple[type[Exception], ...] = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    *(
        found
        for found in vars(exceptions).values()
        if isinstance(found, type) and issubclass(found, Exception)
    ),
)
"""The exceptions of the library at an event that it cannot read."""
_ROWS = (WriteRowsEvent, UpdateRowsEvent, DeleteRowsEvent)


class Unread:
    """A value that the library does not return as the server has it."""


UNREAD = Unread()


@dataclass(frozen=True, slots=True)
class LibraryChange:
    """A row of a captured table: ``op`` is c, u or d; images by column name."""

    op: str
    source: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None


@dataclass(slots=True)
class LibraryTransaction:
    """``unread`` names the event that the library cannot read; "" if it reads all."""

    gtid: str
    changes: list[LibraryChange] = field(default_factory=list)
    unread: str = ""


def transactions_after(
    settings: MySqlSettings, position: Mapping[str, Any], captures: Callable[[str, str], bool]
) -> Generator[LibraryTransaction, None, None]:
    """The transactions after a position, without end.

    ``position`` are the library's arguments ``auto_position`` and ``is_mariadb``.

    Raises:
        SourceUnavailable: the server does not answer within 30 s.
        UnsupportedChange: the library fails at an event.
    """
    where = f"{settings.host}:{settings.port} (database={settings.name})"
    reader = BinLogStreamReader(
        connection_settings={
            "host": settings.host,
            "port": settings.port,
            "user": settings.user,
            "password": settings.password,
            "read_timeout": _SILENCE_S,
            **settings.tls.arguments(settings.host),
        },
        server_id=random.randrange(10**6, 2**32 - 1),
        blocking=True,
        slave_heartbeat=_HEARTBEAT_S,
        filter_non_implemented_events=False,
        enable_logging=False,
        **position,
    )
    try:
        yield from _transactions(reader, captures)
    except pymysql.Error as error:
        raise SourceUnavailable(f"{where}: {error}") from error
    except _REFUSALS as error:
        raise UnsupportedChange(
            f"{where}: mysql-replication fails at {reader.log_file}:{reader.log_pos}: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        reader.close()


def _transactions(
    reader: Any, captures: Callable[[str, str], bool]
) -> Iterator[LibraryTransaction]:
    current: LibraryTransaction | None = None
    in_group = False
    for event in reader:
        if isinstance(event, GtidEvent | MariadbGtidEvent):
            if current is not None:
                yield current
            current, in_group = LibraryTransaction(event.gtid), False
            continue
        if current is None:
            continue
        if isinstance(event, _ROWS):
            if captures(event.schema, event.table):
                current.changes.extend(_changes(event))
        elif isinstance(event, QueryEvent):
            word = str(event.query).strip().upper()
            if word.startswith("XA "):
                current.unread = "XA"
            if word == "BEGIN" or word.startswith("XA START"):
                in_group = True
            elif not in_group or word in ("COMMIT", "ROLLBACK"):
                yield current
                current = None
        elif isinstance(event, XidEvent | XAPrepareEvent):
            yield current
            current = None
        elif isinstance(event, NotImplementedEvent):
            if event.event_type in _COMPRESSED:
                current.unread = f"an event of type {event.event_type}, which is compressed"
        elif isinstance(event, HeartbeatLogEvent) and current.unread:
            yield current  # The event that ends the transaction is compressed, too.
            current = None


def _changes(event: Any) -> Iterator[LibraryChange]:
    source = join_source(event.schema, event.table)
    for row in event.rows:
        if isinstance(event, UpdateRowsEvent):
            before = _image(row["before_values"], row["before_none_sources"])
            after = _image(row["after_values"], row["after_none_sources"])
            yield LibraryChange("u", source, before, after)
        else:
            image = _image(row["values"], row["none_sources"])
            is_insert = isinstance(event, WriteRowsEvent)
            yield LibraryChange(
                "c" if is_insert else "d",
                source,
                None if is_insert else image,
                image if is_insert else None,
            )


def _image(values: Mapping[str, Any], none_sources: Mapping[str, str]) -> dict[str, Any]:
    """The columns; ``UNREAD`` where the library returns None for a value that is not NULL."""
    return {
        name: UNREAD if value is None and none_sources.get(name, NULL) != NULL else value
        for name, value in values.items()
    }
