"""The document of a cluster on PostgreSQL, MariaDB, MySQL and S3: replaced by one at a time."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from databus.common.config import parse
from databus.common.errors import ConfigError, ServerUnavailable
from databus.relay.cluster.document_row import DocumentRow
from databus.relay.cluster.shared_document import DocumentObject, SharedDocument, open_document
from tests.support.config_text import section
from tests.support.fixtures import FreshDatabase
from tests.support.s3_server import S3Server

RELAY = {"relay": "a", "address": "http://127.0.0.1:8700"}


def opened(lease: float = 40.0, **keys: object) -> SharedDocument:
    """The document of a cluster with these keys."""
    text = section("[relay]", {"listen": "127.0.0.1:0"})
    config = parse(text + section("[cluster]", {**RELAY, "lease": lease, **keys}))
    assert config.cluster is not None
    return open_document(config.cluster)


@pytest.fixture(params=["postgres", "mariadb", "mysql", "s3"])
def make(request: pytest.FixtureRequest) -> Callable[[], SharedDocument]:
    """Makes documents of one store, each with a connection of its own."""
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3")
        options = server.options()
        keys = {key: getattr(options, key) for key in ("endpoint", "region", "access_key")}
        keys["secret_key"] = options.secret_key.get_secret_value()
        url = server.empty_prefix()
        return lambda: opened(store=url, s3=keys)
    database: FreshDatabase = request.getfixturevalue(f"{request.param}_database")
    return lambda: opened(store=database.url)


def test_a_document_is_replaced_only_on_top_of_the_version_that_was_read(
    make: Callable[[], SharedDocument],
) -> None:
    one, other = make(), make()
    assert one.read() is None
    assert other.read() is None
    assert one.replace(b'{"n": 1}', None)
    assert not other.replace(b'{"n": 2}', None)
    first = other.read()
    assert first is not None
    assert first.content == b'{"n": 1}'
    assert other.replace(b'{"n": 3}', first.tag)
    assert not one.replace(b'{"n": 4}', first.tag)
    second = one.read()
    assert second is not None
    assert second.content == b'{"n": 3}'
    assert second.tag != first.tag
    one.close()
    other.close()


def test_of_replacements_at_once_none_is_lost(make: Callable[[], SharedDocument]) -> None:
    document = make()
    assert document.replace(b"0 ", None)

    def count(number: int) -> None:
        own = make()
        for step in range(5):
            while True:
                stored = own.read()
                assert stored is not None
                total = int(stored.content.partition(b" ")[0]) + 1
                if own.replace(f"{total} {number}.{step}".encode(), stored.tag):
                    break
        own.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(4)))
    found = document.read()
    assert found is not None
    assert found.content.startswith(b"20 ")
    document.close()


def test_a_lost_answer_of_s3_is_no_conflict(s3: S3Server) -> None:
    options = s3.options()
    keys = {key: getattr(options, key) for key in ("endpoint", "region", "access_key")}
    keys["secret_key"] = options.secret_key.get_secret_value()
    document = opened(store=s3.empty_prefix(), s3=keys, name="lost")
    assert isinstance(document, DocumentObject)
    s3.faults.lost_writes = ["lost.cluster"]
    assert document.replace(b"a", None)
    found = document.read()
    assert found is not None
    s3.faults.lost_writes = ["lost.cluster"]
    assert document.replace(b"b", found.tag)


@pytest.mark.parametrize("scheme", ["postgresql", "mariadb"])
def test_a_server_that_does_not_answer_is_given_up_within_a_part_of_the_lease(
    scheme: str,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        document = opened(lease=0.8, store=f"{scheme}://u:hush@127.0.0.1:{port}/shop")
        with pytest.raises(ServerUnavailable, match=r"store at .*127\.0\.0\.1") as raised:
            document.read()
        assert "hush" not in str(raised.value)
        document.close()


def test_an_account_that_may_not_create_the_table_gets_its_statement(
    postgres_database: FreshDatabase,
) -> None:
    role = f"{postgres_database.name}_reader"
    postgres_database.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'hush'")
    try:
        url = postgres_database.url.replace("databus:databus@", f"{role}:hush@")
        document = opened(store=url)
        with pytest.raises(ServerUnavailable, match="CREATE TABLE IF NOT EXISTS public") as raised:
            document.read()
        assert "hush" not in str(raised.value)
        assert isinstance(document, DocumentRow)
        postgres_database.execute(document.ddl)
        postgres_database.execute(f"GRANT SELECT, INSERT, UPDATE ON databus_cluster TO {role}")
        assert document.read() is None
        assert document.replace(b"{}", None)
        document.close()
    finally:
        postgres_database.execute(f"DROP OWNED BY {role}")
        postgres_database.execute(f"DROP ROLE {role}")


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({}, "needs zookeeper or store"),
        ({"zookeeper": "z:2181", "store": "s3://b/c"}, "and not both"),
        ({"store": "redis://h/0"}, "scheme is 'redis'"),
        ({"store": "shop"}, "scheme is 'shop'"),
        ({"store": "postgresql://u:pa/ss@h/d"}, "write %2F"),
        ({"store": "postgresql://u:hush@h/"}, "no name of a database"),
        ({"store": "mariadb://u:hush@h/a`b"}, "no name of a database"),
        ({"store": "postgresql://u:hush@h/d?sslmod=require"}, "sslmod"),
        ({"store": "s3://b/c?x=1"}, "s3://bucket/prefix"),
    ],
)
def test_a_store_that_cannot_be_one_is_refused(keys: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        opened(**keys)
    assert "hush" not in str(raised.value)
