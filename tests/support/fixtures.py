"""Fixtures of the whole suite.

A server is started once for each test process and shared; a test works in a database of
its own.  A test that kills or reconfigures a server starts its own from
``databus.cli.demo.private_servers``.  With DATABUS_TEST_SKIP_SERVERS=1 the tests that need one are
skipped; otherwise a server that cannot be started is a failure, not a skip.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from databus.cli.demo import private_servers
from databus.cli.demo.private_servers import MariaDBServer, PostgresServer, PrivateServer
from databus.common.errors import MissingDependency
from tests.support.cluster_reader import ClusterReader, StartClusterReader
from tests.support.faulty_proxy import FaultyProxy, Proxies
from tests.support.live_relay import LiveRelay
from tests.support.mysql_server import MySQLServer, mysql_launcher
from tests.support.processes import Processes
from tests.support.s3_server import Faults, S3Server
from tests.support.server_templates import copied_data_folders
from tests.support.waiting import PATIENCE, eventually_sync

Server = TypeVar("Server", bound=PrivateServer)

_numbers = itertools.count(1)
_versions: set[str] = set()
_PRODUCT = os.environ.get("DATABUS_TEST_PRODUCT", "")
"""scripts/matrix.sh: only the tests of this product are run."""
_STARTED = {"processes", "mysql", "mariadb", "postgres", "own_mariadb"}
"""Fixtures that start what is not the test's own process."""


@dataclass(frozen=True)
class FreshDatabase:
    """An empty database on a shared server, dropped after the test."""

    server: PrivateServer
    name: str

    @property
    def url(self) -> str:
        return self.server.url(self.name)

    def execute(self, sql: str, *parameters: object) -> list[tuple[object, ...]]:
        """Run one statement and commit it; returns its rows."""
        return self.server.execute(sql, parameters, database=self.name)

    @contextmanager
    def session(self) -> Iterator[Any]:
        """A cursor of a session of MariaDB or MySQL that has ended at the server, too, afterwards.

        The server ends a session after its connection: until then another session cannot commit
        what it has prepared (``XAER_NOTA``).
        """
        connection = self.server.connect(self.name)
        session_id = connection.thread_id()
        try:
            with connection.cursor() as cursor:
                yield cursor
        finally:
            connection.close()
        rows = "SELECT id FROM information_schema.processlist WHERE id = %s"
        eventually_sync(lambda: not self.execute(rows, session_id), 30, "the session has ended")

    def transaction(self, *statements: str) -> None:
        """Run statements as one transaction."""
        connection = self.server.connect(self.name)
        try:
            cursor = connection.cursor()
            cursor.execute("BEGIN")
            for statement in statements:
                cursor.execute(statement)
            cursor.execute("COMMIT")
            cursor.close()
        finally:
            connection.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    """Mark a test by what its fixtures start, before tests are chosen by their marks.

    Long files come first in the end: files are handed to pytest-xdist's processes in this order,
    and a long one that came last would be waited for by all of them.
    """
    for item in items:
        if (limit := item.get_closest_marker("timeout")) is not None:
            item.add_marker(pytest.mark.timeout(limit.args[0] * PATIENCE), append=False)
        used = set(getattr(item, "fixturenames", ()))
        if used & {"mariadb", "mariadb_database", "own_mariadb"}:
            item.add_marker(pytest.mark.mariadb)
        if used & {"postgres", "postgres_database"}:
            item.add_marker(pytest.mark.postgres)
        if used & _STARTED or "integration" in item.path.parts:
            item.add_marker(pytest.mark.processes)
    if _PRODUCT:
        items[:] = [item for item in items if _product_of(item) == _PRODUCT]
    yield
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def _product_of(item: pytest.Item) -> str:
    """The product whose server a test starts: by its parameters, fixtures, marks or file."""
    parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
    named = {str(value) for value in parameters} | {mark.name for mark in item.iter_markers()}
    for product in ("mysql", "postgres", "mariadb"):
        fixtures = {product, f"{product}_database", f"own_{product}"}
        if product in named or fixtures & set(getattr(item, "fixturenames", ())):
            return product
    parts = item.path.stem.split("_")
    return "sqlite" if "sqlite" in item.name else parts[1] if parts[1] == "mysql" else "mariadb"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist hands its versions to the process that prints."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["private_servers"] = sorted(_versions)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _versions.update(getattr(node, "workeroutput", {}).get("private_servers", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for version in sorted(_versions):
        terminalreporter.write_line(f"private server: {version}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under a failed test, what its processes logged last and how those that ended did."""
    report = yield
    started = getattr(item, "funcargs", {}).get("processes")
    if report.failed and isinstance(started, Processes):
        for process in started.started:
            state = "runs" if process.running else f"ended with {process.exit_code}"
            report.sections.append((f"{process.log_path.name}: {state}", process.log[-2000:]))
    return report


def skip_if_unwanted() -> None:
    if os.environ.get("DATABUS_TEST_SKIP_SERVERS") == "1":
        pytest.skip("DATABUS_TEST_SKIP_SERVERS=1")


def mysql_or_skip(folders: pytest.TempPathFactory) -> MySQLServer:
    """A private MySQL, to be started; the only server that a machine may be without."""
    skip_if_unwanted()
    try:
        mysql_launcher()
    except MissingDependency as error:
        pytest.skip(error.message)
    return MySQLServer(folders.mktemp("mysql") / "server")


@pytest.fixture(scope="session", autouse=True)
def _data_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("templates")
    with copied_data_folders(folder):
        yield
    shutil.rmtree(folder)


def _running(server: Server, product: str) -> Iterator[Server]:
    with server:
        _versions.add(f"{product} {server.version}")
        yield server


@pytest.fixture(scope="session")
def mariadb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDBServer]:
    """A private MariaDB for the whole run."""
    skip_if_unwanted()
    yield from _running(MariaDBServer(tmp_path_factory.mktemp("mariadb") / "server"), "MariaDB")


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A private PostgreSQL for the whole run."""
    skip_if_unwanted()
    yield from _running(
        PostgresServer(tmp_path_factory.mktemp("postgres") / "server"), "PostgreSQL"
    )


def _fresh(server: PrivateServer) -> Iterator[FreshDatabase]:
    name = f"t{os.getpid()}_{next(_numbers)}"
    server.create_database(name)
    try:
        yield FreshDatabase(server, name)
    finally:
        server.drop_database(name)


@pytest.fixture
def mariadb_database(mariadb: MariaDBServer) -> Iterator[FreshDatabase]:
    """An empty database on the shared MariaDB."""
    yield from _fresh(mariadb)


@pytest.fixture(scope="session")
def mysql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MySQLServer]:
    """A private MySQL for the whole run."""
    yield from _running(mysql_or_skip(tmp_path_factory), "MySQL")


@pytest.fixture
def mysql_database(mysql: MySQLServer) -> Iterator[FreshDatabase]:
    """An empty database on the shared MySQL."""
    yield from _fresh(mysql)


@pytest.fixture
def postgres_database(postgres: PostgresServer) -> Iterator[FreshDatabase]:
    """An empty database on the shared PostgreSQL."""
    yield from _fresh(postgres)


SetRowMetadata = Callable[[PrivateServer, str], None]


@pytest.fixture
def row_metadata() -> Iterator[SetRowMetadata]:
    """Sets a server's ``binlog_row_metadata``; after the test it is FULL again."""
    changed: list[PrivateServer] = []

    def change(server: PrivateServer, value: str) -> None:
        changed.append(server)
        server.execute(f"SET GLOBAL binlog_row_metadata = {value}")

    yield change
    for server in changed:
        server.execute("SET GLOBAL binlog_row_metadata = FULL")


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[LiveRelay]:
    """A worker over a ring that the test fills."""
    live = LiveRelay(tmp_path)
    async with live.served():
        yield live
    live.close()


@pytest.fixture
def own_mariadb(tmp_path: Path) -> Iterator[MariaDBServer]:
    """A MariaDB that the test may kill and reconfigure, with a database ``shop``."""
    with MariaDBServer(tmp_path / "own") as server:
        server.create_database("shop")
        yield server


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A function that gives another free port at each call."""
    return private_servers.free_port


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts databus commands; all of them are killed after the test."""
    started = Processes(tmp_path)
    try:
        yield started
    finally:
        started.end_all()


@pytest.fixture(scope="session")
def _s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(_s3: S3Server) -> Iterator[S3Server]:
    """A private S3 server that does nothing wrong until a test sets faults."""
    yield _s3
    _s3.faults = Faults()


@pytest.fixture
async def faulty_proxy() -> AsyncIterator[Proxies]:
    """``proxy = await faulty_proxy(host, port)``; closed after the test."""
    opened: list[FaultyProxy] = []

    async def start(host: str, port: int) -> FaultyProxy:
        proxy = await FaultyProxy(host, port).start()
        opened.append(proxy)
        return proxy

    yield start
    for proxy in opened:
        await proxy.close()


@pytest.fixture
def start_reader() -> Iterator[StartClusterReader]:
    """Starts clients of a cluster, which end with the test, whatever its result."""
    readers: list[ClusterReader] = []

    def start(database: str, urls: list[str]) -> ClusterReader:
        readers.append(ClusterReader(database, urls))
        return readers[-1]

    yield start
    for reader in readers:
        reader.end()
