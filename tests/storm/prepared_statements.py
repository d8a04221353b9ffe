"""Statements by the binary protocol: COM_STMT_PREPARE, COM_STMT_EXECUTE, COM_STMT_CLOSE.

Layout: MySQL's documentation, "Prepared Statements" of the client/server protocol.
"""

from __future__ import annotations

import re
import struct
from typing import Any

from pymysql.constants import COMMAND

BINARY = "/*binary*/"
"""In front of a statement that is sent so; its plain strings become parameters."""
_STRING = re.compile(r"(?<!['\\w])'([^'\\\\]*)'(?!')")
_VAR_STRING = 0xFD
_MANY_ROWS_FOLLOW = 0x08


def execute(connection: Any, sql: str) -> None:
    """Prepare a statement without rows, execute it once, and close it.

    Raises:
        pymysql.err.Error: the server refuses it.
    """
    parameters: list[bytes] = []
    if not any(mark in sql for mark in ("--", "#", '"', "`so`", "CONCAT", "PREPARE")):
        parameters = [found.encode() for found in _STRING.findall(sql)]
        sql = _STRING.sub("?", sql)
    connection._execute_command(COMMAND.COM_STMT_PREPARE, sql.encode())
    answer = connection._read_packet()
    data = answer._data
    number, columns, count = struct.unpack_from("<IHH", data, 1)
    for group in (count, columns):
        if group:
            while not connection._read_packet().is_eof_packet():
                pass
    if count != len(parameters):
        raise ValueError(f"{count} parameters in {sql!r}, not {len(parameters)}")
    body = struct.pack("<IBI", number, 0, 1)
    if count:
        body += bytes((count + 7) // 8) + b"\x01" + bytes((_VAR_STRING, 0)) * count
        body += b"".join(_counted(value) for value in parameters)
    try:
        connection._execute_command(COMMAND.COM_STMT_EXECUTE, body)
        connection._read_query_result(unbuffered=False)
    finally:
        connection._execute_command(COMMAND.COM_STMT_CLOSE, struct.pack("<I", number))


def _counted(value: bytes) -> bytes:
    size = len(value)
    return (bytes((size,)) if size < 251 else b"\xfc" + struct.pack("<H", size)) + value
