"""The checkpoints that consumers have stored: in a file, in LMDB, or in a database's table."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from databus.client.checkpoints.checkpoint_stores import (
    FileCheckpoints,
    LmdbCheckpoints,
    describe_checkpoint,
)
from databus.client.checkpoints.checkpoint_table import StoredCheckpoint
from databus.client.checkpoints.database_checkpoints import AsyncpgCheckpoints, DatabaseCheckpoints
from databus.common.checkpoint import Checkpoint, decode
from databus.common.errors import BadRequest, StoreError
from databus.common.extras import require_extra
from databus.common.private import HiddenUrl

T = TypeVar("T")
_LMDB_FILE = "data.mdb"


@dataclass(frozen=True, slots=True)
class Stored:
    """One consumer's checkpoint."""

    consumer: str
    """Its name; empty for a file, which has one consumer."""
    checkpoint: Checkpoint | None
    """None if the consumer has not finished anything yet."""
    updated_us: int | None = None
    """When it was stored, in microseconds since 1970, where the store has that."""
    owner: str = ""
    """The process that uses it, as host:pid:number, where the store has that."""

    @property
    def updated(self) -> str:
        """When it was stored, in UTC; empty if unknown."""
        if self.updated_us is None:
            return ""
        return f"{dt.datetime.fromtimestamp(self.updated_us / 1e6, dt.UTC):%Y-%m-%d %H:%M:%S}"


class CheckpointAccess(Protocol):
    """A store, for an operator."""

    def all(self) -> list[Stored]:
        """The checkpoints of all consumers."""

    def set(self, consumer: str, checkpoint: Checkpoint) -> None:
        """Store a checkpoint, whatever is there.

        Raises:
            StoreBusy: a client uses the file.
        """


def opened(store: str, table: str) -> CheckpointAccess:
    """The store at a path or a URL.

    Raises:
        BadRequest: the URL is of no kind that can hold checkpoints.
        StoreError: there is no such file.
    """
    if "://" not in store:
        path = Path(store)
        if (path / _LMDB_FILE).is_file():
            return _Lmdb(path)
        if path.is_file():
            return _File(path)
        raise StoreError(f"there is no file of checkpoints at {path}")
    if _is_postgres(store):
        return _Postgres(store, table)
    return _Database(connecting(store), table)


def connecting(url: str) -> Callable[[], Any]:
    """A function that opens a connection of the DB-API.

    Raises:
        BadRequest: the URL is of no kind of database that is known.
        StoreError: there is no such file.
    """
    scheme = urlsplit(url).scheme
    if scheme == "sqlite":
        path = Path(unquote(url.removeprefix("sqlite:///")))
        if not path.is_file():
            raise StoreError(f"there is no database at {path}")
        return partial(sqlite3.connect, path)
    if scheme in ("mysql", "mariadb"):
        return partial(_mysql, url)
    if _is_postgres(url):
        require_extra("demo")
        import psycopg

        return partial(psycopg.connect, url)
    raise BadRequest(
        f"{HiddenUrl(url)} is neither a path nor a URL of postgresql, mysql, mariadb or sqlite"
    )


def _is_postgres(url: str) -> bool:
    return urlsplit(url).scheme in ("postgresql", "postgres")


class _File:
    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self) -> list[Stored]:
        found = describe_checkpoint(self._path)
        if not found["checkpoints"]:
            raise StoreError(f"{self._path} holds no undamaged checkpoint")
        return [Stored("", decode(json.dumps(found["checkpoints"][0])))]

    def set(self, consumer: str, checkpoint: Checkpoint) -> None:
        if consumer:
            raise BadRequest(f"{self._path} has one consumer without a name: leave --consumer out")
        with contextlib.closing(FileCheckpoints(self._path)) as store:
            store.save(checkpoint)


class _Lmdb:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def all(self) -> list[Stored]:
        names = self._by_name("", LmdbCheckpoints.names)
        return [Stored(name, self._by_name(name, LmdbCheckpoints.load)) for name in names]

    def set(self, consumer: str, checkpoint: Checkpoint) -> None:
        self._by_name(consumer, lambda store: store.save(checkpoint))

    def _by_name(self, name: str, work: Callable[[LmdbCheckpoints], T]) -> T:
        with contextlib.closing(LmdbCheckpoints(self._folder, name)) as store:
            return work(store)


class _Database:
    def __init__(self, connect: Callable[[], Any], table: str) -> None:
        self._connect, self._table = connect, table

    def all(self) -> list[Stored]:
        return list(map(_stored, self._of("-").rows()))

    def set(self, consumer: str, checkpoint: Checkpoint) -> None:
        self._of(consumer).set(checkpoint)

    def _of(self, consumer: str) -> DatabaseCheckpoints:
        return DatabaseCheckpoints(consumer, self._connect, table=self._table)


class _Postgres:
    def __init__(self, url: str, table: str) -> None:
        self._url, self._table = url, table

    def all(self) -> list[Stored]:
        return list(map(_stored, asyncio.run(self._of("-").rows())))

    def set(self, consumer: str, checkpoint: Checkpoint) -> None:
        asyncio.run(self._of(consumer).set(checkpoint))

    def _of(self, consumer: str) -> AsyncpgCheckpoints:
        import asyncpg

        return AsyncpgCheckpoints(consumer, partial(asyncpg.connect, self._url), table=self._table)


def _stored(row: StoredCheckpoint) -> Stored:
    return Stored(row.consumer, row.checkpoint, row.updated_us, row.owner)


def _mysql(url: str) -> Any:
    import pymysql

    parts = urlsplit(url)
    return pymysql.connect(
        host=parts.hostname,
        port=parts.port or 3306,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=unquote(parts.path.lstrip("/")),
        charset="utf8mb4",
        connect_timeout=10,
    )
