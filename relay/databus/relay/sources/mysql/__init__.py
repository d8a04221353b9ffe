"""The source for MariaDB and MySQL: row-format binlog with GTIDs, read as a replica reads it."""

from __future__ import annotations

from databus.relay.sources.mysql.source import MySqlSource

__all__ = ["MySqlSource"]
