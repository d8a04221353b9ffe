"""TLS to MariaDB and MySQL servers with certificates of the test's own."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from databus.cli.demo.private_servers import MariaDBServer
from databus.common.errors import ConfigError, MissingDependency, PreflightFailed
from databus.relay.sources.mysql import MySqlSource
from databus.relay.sources.mysql.protocol.mysql_authentication import SignInConnection
from databus.relay.sources.mysql.protocol.mysql_tls import Tls, read_tls
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import mariadb_config, read_to_end
from tests.support.mysql_server import MySQLServer, mysql_launcher
from tests.support.opened_source import opened_scn

pytestmark = [pytest.mark.mariadb, pytest.mark.slow, pytest.mark.timeout(240)]


@dataclass(frozen=True)
class Encrypted:
    """A server that lets ``locked`` in with TLS only, and ``known`` only with a certificate."""

    server: MariaDBServer
    folder: Path

    def url(self, user: str, **parameters: str) -> str:
        scheme = "mysql" if isinstance(self.server, MySQLServer) else "mariadb"
        query = "&".join(f"ssl-{name}={value}" for name, value in parameters.items())
        return f"{scheme}://{user}:secret@127.0.0.1:{self.server.port}/shop?{query}"

    def file(self, name: str) -> str:
        return str(self.folder / name)


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def make_certificates(folder: Path) -> None:
    """Two authorities; the first has signed a server, not by its address, and a client."""
    for name in ("ca", "other-ca"):
        openssl(
            "req", "-new", "-x509", "-days", "2", "-nodes", "-newkey", "rsa:2048", "-subj",
            f"/CN={name}", "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem",
        )  # fmt: skip
    for name in ("server", "client"):
        openssl(
            "req", "-new", "-nodes", "-newkey", "rsa:2048", "-subj", f"/CN={name}", "-addext",
            "subjectAltName=DNS:db.example", "-keyout", f"{folder}/{name}.key",
            "-out", f"{folder}/{name}.csr",
        )  # fmt: skip
        openssl(
            "x509", "-req", "-days", "2", "-in", f"{folder}/{name}.csr", "-CA", f"{folder}/ca.pem",
            "-CAkey", f"{folder}/ca.key", "-CAcreateserial", "-copy_extensions", "copyall",
            "-out", f"{folder}/{name}.pem",
        )  # fmt: skip


@pytest.fixture(scope="module", params=["mariadb", "mysql"])
def encrypted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Encrypted]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed; it makes the test's certificates")
    kind: type[MariaDBServer] = MariaDBServer
    if request.param == "mysql":
        kind = MySQLServer
        try:
            mysql_launcher()
        except MissingDependency as error:
            pytest.skip(error.message)
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(folder)
    options = [
        f"--ssl-ca={folder}/ca.pem",
        f"--ssl-cert={folder}/server.pem",
        f"--ssl-key={folder}/server.key",
    ]
    with kind(folder / "server", options=options) as server:
        server.create_database("shop")
        for user, how in (("locked", "SSL"), ("known", "X509")):
            server.execute(f"CREATE USER {user}@'%' IDENTIFIED BY 'secret' REQUIRE {how}")
            server.execute(f"GRANT ALL PRIVILEGES ON *.* TO {user}@'%'")
        yield Encrypted(server, folder)


async def streams(encrypted: Encrypted, url: str) -> None:
    """A backlog larger than a TLS record, and a row at the tail, come through."""
    server = encrypted.server
    server.execute("DROP TABLE IF EXISTS t", database="shop")
    server.execute("CREATE TABLE t (id INT PRIMARY KEY, v TEXT)", database="shop")
    source = MySqlSource(mariadb_config(url, "shop.*"))
    try:
        start = await opened_scn(source)
        values = ", ".join(f"({number}, REPEAT('x', 500))" for number in range(200))
        server.execute(f"INSERT INTO t VALUES {values}", database="shop")
        streamed = await read_to_end(source, start)
        assert [event.key["id"] for event in streamed.events()] == list(range(200))
        assert await source.largest_key("shop.t") is not None
    finally:
        await source.close()


async def test_the_stream_and_the_queries_are_encrypted(encrypted: Encrypted) -> None:
    # This account is let in with TLS only, on every connection.
    await streams(encrypted, encrypted.url("locked", mode="required"))
    await streams(encrypted, encrypted.url("locked", ca=encrypted.file("ca.pem")))


async def test_our_own_certificate_is_shown(encrypted: Encrypted) -> None:
    url = encrypted.url(
        "known",
        mode="verify_ca",
        ca=encrypted.file("ca.pem"),
        cert=encrypted.file("client.pem"),
        key=encrypted.file("client.key"),
    )
    await streams(encrypted, url)


@pytest.mark.parametrize(
    ("mode", "ca", "message"),
    [
        ("verify_ca", "other-ca.pem", r"ssl-mode=verify_ca, ssl-ca=.*other-ca.pem.*verify failed"),
        ("verify_identity", "ca.pem", r"ssl-mode=verify_identity.*127\.0\.0\.1"),
        ("verify_ca", "none.pem", r"ssl-ca=.*none.pem cannot be used: .*No such file"),
        ("disabled", "", "refuses us"),
        # Nothing is between us and a loopback address: not encrypted, so not let in.
        ("preferred", "", "refuses us"),
    ],
)
async def test_what_does_not_fit_is_refused_and_the_setting_named(
    encrypted: Encrypted, mode: str, ca: str, message: str
) -> None:
    parameters = {"mode": mode, **({"ca": encrypted.file(ca)} if ca else {})}
    source = MySqlSource(mariadb_config(encrypted.url("locked", **parameters), "shop.*"))
    try:
        with pytest.raises(PreflightFailed, match=message):
            await source.open()
    finally:
        await source.close()


def test_the_machines_certificates_are_not_read_where_none_is_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("they take about 20 ms")

    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", fail)
    unopened = SignInConnection(defer_connect=True, **Tls().arguments("db.example"))
    assert unopened.ctx.verify_mode == ssl.CERT_NONE
    context = Tls("required").arguments("db.example")["ssl"]
    assert context.verify_mode == ssl.CERT_NONE
    with pytest.raises(AssertionError, match="20 ms"):
        Tls("verify_ca").arguments("db.example")


async def test_a_server_without_tls_is_refused_where_tls_is_required(
    mariadb_database: FreshDatabase,
) -> None:
    ((has,),) = mariadb_database.execute("SELECT @@have_ssl")
    if has == "YES":
        pytest.skip("this MariaDB makes a certificate of its own")
    url = f"{mariadb_database.url}?ssl-mode=required"
    source = MySqlSource(mariadb_config(url, f"{mariadb_database.name}.*"))
    with pytest.raises(PreflightFailed, match="ssl-mode=required"):
        await source.open()
    await source.close()


def test_a_parameter_or_mode_that_is_unknown_is_a_wrong_configuration() -> None:
    assert read_tls("shop", "") == Tls("preferred")
    assert read_tls("shop", "ssl-ca=/ca.pem").mode == "verify_ca"
    for query, message in (
        ("sslmode=require", "'sslmode'; known are ssl-mode"),
        ("ssl-mode=maybe", "'maybe'; it takes disabled"),
        ("ssl-key=/k.pem", "without ssl-cert"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_tls("shop", query)


def test_elsewhere_than_here_tls_is_taken_where_it_is_offered() -> None:
    assert Tls().arguments("db.example") == {"ssl_disabled": False}
    assert Tls().arguments("localhost") == Tls().arguments("::1") == {"ssl_disabled": True}
