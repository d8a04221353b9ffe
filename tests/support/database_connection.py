"""An application's connection to its database, by the URL of a fixture."""

from __future__ import annotations

import sqlite3
from typing import Any
from urllib.parse import unquote, urlsplit

import psycopg
import pymysql


def connect(url: str) -> Any:
    """An open DB-API connection, which begins a transaction with its first statement."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return sqlite3.connect(unquote(url.removeprefix("sqlite:///")))
    if parts.scheme == "postgresql":
        return psycopg.connect(url)
    return pymysql.connect(
        host=parts.hostname,
        port=parts.port,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=unquote(parts.path.lstrip("/")),
        charset="utf8mb4",
    )
