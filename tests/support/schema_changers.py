"""The online schema change tools that teams run: pt-online-schema-change and gh-ost."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from databus.cli.demo.private_servers import PASSWORD, USER, PrivateServer
from databus.common.errors import MissingDependency
from tests.support.mysql_server import MySQLServer
from tests.support.waiting import PATIENCE

GH_OST_VARIABLE = "DATABUS_GH_OST"


def command_of(tool: str) -> str:
    """Where a tool's program is.

    Raises:
        MissingDependency: it is not there; the message says how it gets there.
    """
    if tool == "pt-online-schema-change":
        found = shutil.which(tool)
        how = "it is in Debian's percona-toolkit; scripts/setup.sh percona installs it"
    else:
        cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        path = os.environ.get(GH_OST_VARIABLE) or Path(cache, "databus-gh-ost", "gh-ost")
        found = shutil.which(str(path))
        how = "scripts/gh_ost.sh builds it, with Go and access to its module"
    if found is None:
        raise MissingDependency(f"there is no {tool}: {how}")
    return found


def require_server(tool: str, server: PrivateServer) -> None:
    """Skip the running test where the tool itself cannot work with the server.

    gh-ost 1.1.6 sends SHOW MASTER STATUS, which MySQL dropped in 8.4. Of MariaDB it wants variables
    that 10.11 does not have, and it does not read 11.4's binlog. pt-online-schema-change refuses
    MySQL versions that bug 96145 makes crash. So MySQL 8.0.15, of `make matrix`, is for gh-ost.
    """
    is_mysql = isinstance(server, MySQLServer)
    is_new = isinstance(server, MySQLServer) and server.is_at_least(8, 4)
    fits = (is_mysql and not is_new) if tool == "gh-ost" else (is_new or not is_mysql)
    if not fits:
        pytest.skip(f"{tool} does not work with {server.product} {server.version}")


def alter(tool: str, server: PrivateServer, database: str, table: str, change: str) -> None:
    """Run a tool to its end, cut-over included."""
    program = command_of(tool)
    if tool == "pt-online-schema-change":
        path = f"h=127.0.0.1,P={server.port},u={USER},p={PASSWORD},D={database},t={table}"
        command = [
            program, "--execute", "--alter", change, "--recursion-method=none",
            "--no-version-check", "--chunk-size=500", "--max-load=Threads_running=500",
            "--critical-load=Threads_running=900", path,
        ]  # fmt: skip
    else:
        command = [
            program, "--execute", f"--alter={change}", "--host=127.0.0.1",
            f"--port={server.port}", f"--user={USER}", f"--password={PASSWORD}",
            f"--database={database}", f"--table={table}", "--allow-on-master",
            "--chunk-size=500", "--dml-batch-size=100", "--heartbeat-interval-millis=100",
            "--initially-drop-old-table", "--initially-drop-ghost-table", "--ok-to-drop-table",
            # MySQL 8.0.15 never lets its other cut-over drop the table that blocks it (error 1205).
            "--cut-over=two-step", f"--serve-socket-file={server.directory / 'gh-ost.sock'}",
        ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=80 * PATIENCE, check=False
    )
    assert done.returncode == 0, f"{tool}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
