"""Servers that are no database, or another one: what a scripted server can get from the relay."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from databus.common.config import DatabaseConfig, SourceUrl
from databus.common.errors import ConfigError, DatabusError, PreflightFailed, SourceUnavailable
from databus.relay.sources.mysql.protocol import mysql_authentication
from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection as MySqlConnection
from databus.relay.sources.mysql.protocol.mysql_settings import read_settings as mysql_settings
from databus.relay.sources.postgres.protocol import replication_connection
from databus.relay.sources.postgres.protocol.postgres_settings import (
    read_settings as postgres_settings,
)
from databus.relay.sources.postgres.protocol.replication_connection import (
    ReplicationConnection as PostgresConnection,
)
from databus.relay.sources.postgres.tables.postgres_catalogue import Catalogue

PASSWORD = "geheim-9f3c"

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """A server that follows a script with each connection, and records what came in clear."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.received = b""

    def knows_the_password(self) -> bool:
        return PASSWORD.encode() in self.received


@asynccontextmanager
async def peer(script: Script) -> AsyncIterator[Peer]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
            while data := await reader.read(1 << 16):
                found.received += data
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    found = Peer(server.sockets[0].getsockname()[1])
    async with server:
        yield found


def postgres_config(port: int, query: str = "sslmode=disable") -> DatabaseConfig:
    url = f"postgresql://u:{PASSWORD}@127.0.0.1:{port}/d?connect_timeout=5s&{query}"
    return DatabaseConfig(name="d", url=SourceUrl(url))


def mysql_config(port: int, query: str = "ssl-mode=disabled") -> DatabaseConfig:
    url = f"mysql://u:{PASSWORD}@127.0.0.1:{port}/d?{query}"
    return DatabaseConfig(name="d", url=SourceUrl(url))


async def postgres(port: int, query: str = "sslmode=disable") -> DatabusError:
    connection = PostgresConnection(postgres_settings(postgres_config(port, query)))
    with pytest.raises(DatabusError) as caught:
        await connection.connect()
    return caught.value


async def catalogue(port: int, query: str = "sslmode=disable") -> DatabusError:
    """The same of the driver that the catalogue is read with."""
    found = Catalogue(postgres_settings(postgres_config(port, query)))
    with pytest.raises(DatabusError) as caught:
        await found.facts()
    await found.close()
    return caught.value


async def mysql(port: int, query: str = "ssl-mode=disabled") -> DatabusError:
    settings = mysql_settings(mysql_config(port, query))
    with pytest.raises(DatabusError) as caught:
        await asyncio.to_thread(MySqlConnection, settings)
    return caught.value


# -- PostgreSQL


def message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


def asks(code: int, rest: bytes = b"") -> bytes:
    return message(b"R", struct.pack("!I", code) + rest)


async def startup(reader: asyncio.StreamReader) -> None:
    (size,) = struct.unpack("!I", await reader.readexactly(4))
    await reader.readexactly(size - 4)


@pytest.mark.parametrize("ask", [postgres, catalogue])
@pytest.mark.parametrize("query", ["sslmode=disable", "sslmode=prefer"])
async def test_postgresql_does_not_get_the_password_in_clear(
    ask: Callable[[int, str], Awaitable[DatabusError]], query: str
) -> None:
    async def clear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if "prefer" in query:
            await reader.readexactly(8)
            writer.write(b"N")
        await startup(reader)
        writer.write(asks(3))

    async with peer(clear) as server:
        error = await ask(server.port, query)
        assert isinstance(error, PreflightFailed) and "in clear" in error.message
        assert PASSWORD not in str(error)
    assert not server.knows_the_password()


async def test_require_auth_limits_how_postgresql_may_authenticate() -> None:
    async def md5(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await startup(reader)
        writer.write(asks(5, b"salt"))

    async def trust(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await startup(reader)
        writer.write(asks(0) + message(b"Z", b"I"))

    strict = "sslmode=disable&require_auth=scram-sha-256"
    for script in (md5, trust):
        async with peer(script) as server:
            error = await postgres(server.port, strict)
            assert isinstance(error, PreflightFailed) and "require_auth" in error.message
        assert server.received in (b"", message(b"X", b"")), "more than the end of the session"
    with pytest.raises(ConfigError, match="sslmode=require"):
        postgres_settings(postgres_config(1, "require_auth=password"))
    with pytest.raises(ConfigError, match="kerberos"):
        postgres_settings(postgres_config(1, "require_auth=kerberos"))


async def test_postgresql_that_breaks_off_scram_or_makes_it_endless_is_refused() -> None:
    def scram(then: Callable[[bytes], bytes]) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await startup(reader)
            writer.write(asks(10, b"SCRAM-SHA-256\0\0"))
            head = await reader.readexactly(5)
            first = await reader.readexactly(struct.unpack("!I", head[1:])[0] - 4)
            writer.write(then(first.rpartition(b"r=")[2]))

        return script

    def rounds(nonce: bytes) -> bytes:
        return asks(11, b"r=" + nonce + b"x,s=" + base64.b64encode(b"salt") + b",i=2000000000")

    async with peer(scram(lambda _: asks(0) + message(b"Z", b"I"))) as server:
        assert "proved nothing" in (await postgres(server.port)).message
    async with peer(scram(rounds)) as server:
        assert "2000000000 rounds" in (await postgres(server.port)).message


async def test_bytes_before_postgresqls_tls_are_refused() -> None:
    """Else they would count as what the server said under TLS (CVE-2021-23222)."""

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        writer.write(b"S" + asks(0) + message(b"Z", b"I"))

    async with peer(early) as server:
        error = await postgres(server.port, "sslmode=require")
        assert isinstance(error, SourceUnavailable) and "before TLS" in error.message
        assert isinstance(await catalogue(server.port, "sslmode=require"), SourceUnavailable)


async def test_a_large_message_before_postgresql_has_let_us_in_is_refused() -> None:
    for length in (1 << 31, 0xFFFFFFFF, 1 << 20, 3, 0):

        async def large(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int = length
        ) -> None:
            await startup(reader)
            writer.write(b"R" + struct.pack("!I", length) + bytes(64))

        async with peer(large) as server:
            assert f"of {length} bytes" in (await postgres(server.port)).message


async def test_a_message_in_pieces_makes_room_for_itself_alone() -> None:
    """The middle of a message was read as the length of the next one."""

    async def pieces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await startup(reader)
        text = b"Mx" + b"\x3f" * 2000 + b"\0\0"
        whole = message(b"N", text) + asks(0) + message(b"Z", b"I")
        for start in range(0, len(whole), 700):
            writer.write(whole[start : start + 700])
            await writer.drain()
            await asyncio.sleep(0)

    async with peer(pieces) as server:
        connection = PostgresConnection(postgres_settings(postgres_config(server.port)))
        await connection._dial()
        await connection._startup()
        assert len(connection._inbox.data) <= replication_connection._BUFFER_BYTES
        connection.close()


async def test_a_server_that_trickles_or_is_silent_does_not_hold_us_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However little time passes between two bytes."""
    monkeypatch.setattr(mysql_authentication, "SIGN_IN_S", 0.4)

    async def trickle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(struct.pack("<I", 200)[:3] + b"\0\x0a")
        while not writer.is_closing():
            writer.write(b"5")
            await asyncio.sleep(0.02)

    async def silent(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        pass

    for script in (trickle, silent):
        async with peer(script) as server:
            assert "within 0.4 s" in (await mysql(server.port)).message
    for script in (trickle, silent):
        async with peer(script) as server:
            assert isinstance(
                await postgres(server.port, "sslmode=disable&connect_timeout=300ms"),
                SourceUnavailable,
            )


# -- MariaDB and MySQL

_PROTOCOL_41, _SSL, _SECURE, _PLUGIN = 0x200, 0x800, 0x8000, 0x80000


def packet(number: int, body: bytes) -> bytes:
    return struct.pack("<I", len(body))[:3] + bytes([number]) + body


def greeting(plugin: bytes = b"mysql_native_password", *, tls: bool = False) -> bytes:
    flags = _PROTOCOL_41 | _SECURE | _PLUGIN | (_SSL if tls else 0)
    return packet(
        0,
        b"\x0a8.0.30\0" + struct.pack("<I", 7) + b"saltsalt\0" + struct.pack("<H", flags & 0xFFFF)
        + b"\x2d\x02\0" + struct.pack("<H", flags >> 16) + b"\x15" + bytes(10)
        + b"saltsaltsalt\0" + plugin + b"\0",
    )  # fmt: skip


async def next_packet(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readexactly(4)
    return head[3], await reader.readexactly(int.from_bytes(head[:3], "little"))


def switching(plugin: bytes, data: bytes = b"saltsaltsaltsaltsalt\0") -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting())
        number, _ = await next_packet(reader)
        writer.write(packet(number + 1, b"\xfe" + plugin + b"\0" + data))

    return script


@pytest.mark.parametrize("plugin", [b"mysql_clear_password", b"dialog", b"mysql_old_password"])
async def test_mysql_does_not_get_the_password_in_clear(plugin: bytes) -> None:
    data = b"\x04Password: " if plugin == b"dialog" else b"saltsaltsaltsaltsalt\0"
    async with peer(switching(plugin, data)) as server:
        error = await mysql(server.port)
        assert isinstance(error, PreflightFailed), error
        assert plugin.decode() in error.message and PASSWORD not in str(error)
    assert not server.received, "nothing was sent to that question"
    with pytest.raises(ConfigError, match="ssl-mode"):
        mysql_settings(mysql_config(1, "ssl-mode=preferred&enable-cleartext-plugin=true"))
    with pytest.raises(ConfigError, match="true or false"):
        mysql_settings(mysql_config(1, "get-server-public-key=maybe"))


async def test_mysql_gets_no_password_under_a_key_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without TLS, from an address where an attacker may be between."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).public_key()
    pem = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )

    async def full(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting(b"caching_sha2_password"))
        number, _ = await next_packet(reader)
        writer.write(packet(number + 1, b"\x01\x04"))
        number, _ = await next_packet(reader)
        writer.write(packet(number + 1, b"\x01" + pem))

    monkeypatch.setattr(
        "databus.relay.sources.mysql.protocol.mysql_settings.is_loopback", lambda host: False
    )
    async with peer(full) as server:
        error = await mysql(server.port)
        assert isinstance(error, PreflightFailed) and "get-server-public-key" in error.message
    assert not server.received


async def test_a_large_packet_before_mysql_has_let_us_in_is_refused() -> None:
    async def large(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(4):
            writer.write(b"\xff\xff\xff" + bytes([number]) + bytes(0xFFFFFF))
            await writer.drain()

    async with peer(large) as server:
        assert "packet of 16777215 bytes" in (await mysql(server.port)).message


async def test_what_is_no_mysql_is_one_clear_error() -> None:
    for body in (b"\x0a", b"\x0a" + b"8" * 40, b"\xff", b"HTTP/1.1 400 Bad Request\r\n\r\n", b""):

        async def odd(
            _: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes = body
        ) -> None:
            writer.write(packet(0, body))
            writer.write_eof()

        async with peer(odd) as server:
            assert isinstance(await mysql(server.port), SourceUnavailable), body


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, found = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-new", "-x509", "-days", "2", "-nodes", "-newkey", "rsa:2048",
         "-subj", "/CN=localhost", "-keyout", str(key), "-out", str(found)],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, found


async def test_bytes_before_mysqls_tls_are_refused_and_under_tls_clear_needs_the_option(
    certificate: tuple[Path, Path],
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate[1], certificate[0])
    answers = list[bytes]()

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting(tls=True) + packet(2, b"\0\0\0\x02\0\0\0"))

    def clear(listener: socket.socket) -> None:
        for _ in range(2):
            raw, _ = listener.accept()
            raw.sendall(greeting(tls=True))
            raw.recv(36, socket.MSG_WAITALL)  # what asks for TLS; the handshake follows at once
            with context.wrap_socket(raw, server_side=True) as secured:
                number = secured.recv(4)[3]
                secured.recv(1 << 16)
                secured.sendall(packet(number + 1, b"\xfemysql_clear_password\0"))
                answers.append(secured.recv(1 << 16))

    async with peer(early) as server:
        error = await mysql(server.port, "ssl-mode=required")
        assert isinstance(error, SourceUnavailable) and "unrequested" in error.message
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        serving = asyncio.create_task(asyncio.to_thread(clear, listener))
        error = await mysql(port, "ssl-mode=required")
        assert isinstance(error, PreflightFailed) and "enable-cleartext-plugin" in error.message
        await mysql(port, "ssl-mode=required&enable-cleartext-plugin=true")
        await serving
    assert answers[0] == b""
    assert b"".join(answers).endswith(PASSWORD.encode() + b"\0")
