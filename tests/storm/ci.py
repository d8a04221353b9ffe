"""``python -m tests.storm.ci``: the storm over several servers at once, with fresh seeds.

Each server has a process of its own.  Its report is printed when it ends: seeds, statements,
comparisons, suspended tables by reason, and the minimal script of each case that failed.  The last
lines name each failure once more: server, seed, table, script, and the command that repeats it.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from databus.common.errors import MissingDependency
from tests.support.mysql_server import mysql_launcher

SERVERS = ("mariadb", "postgres", "mysql", "sqlite")
"""What is run: servers of ``--db``, or names of scripts/servers.sh such as ``mysql-8.0.15``."""
AT_ONCE = 4
"""A storm waits more than it computes: two take half of a processor."""
_LEFT_OUT = "coverage ("
_SHRINK_S = 40
_FAILURES = 2
_ENDS_WITHIN_S = 420
"""Behind its time a storm shrinks what failed, or waits for a case that does not come to its end.
The bound is for one that hangs."""


def run(server: str, minutes: float, keep: Path) -> tuple[str, list[str], str]:
    """The server's name, a line for each failure, and what people need of its report."""
    option = "--server" if "-" in server else "--db"
    command = [
        sys.executable, "-m", "tests.storm", option, server, "--minutes", f"{minutes}",
        "--shrink-s", f"{_SHRINK_S}", "--failures", f"{_FAILURES}", "--keep", str(keep),
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(minutes * 60 + _ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # It prints where each thread is.
            code = process.wait()
        output.seek(0)
        text = output.read()
    failed = [line for line in text.splitlines() if line.startswith("FAILED ")]
    if code and not failed:
        failed = [f"FAILED {option} {server}: it ended with {code}; see its output above"]
    report, _, rest = text.partition(_LEFT_OUT)
    never = [line for line in rest.splitlines() if line.startswith("never:")]
    return server, failed, "\n".join([report.rstrip(), *never])


def missing(server: str) -> str:
    """Why the machine does not have a server that it need not have; "": it has it."""
    try:
        if server == "mysql":
            mysql_launcher()
    except MissingDependency as error:
        return error.message
    return ""


def main(arguments: list[str]) -> int:
    """Exit code 1: the storm of one server failed.  A server that is missing is skipped."""
    parser = argparse.ArgumentParser(prog="storm-ci", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="for all servers together")
    parser.add_argument("--keep", type=Path, default=Path("var/storm"), help="minimal scripts")
    parser.add_argument("servers", nargs="*", default=SERVERS)
    options = parser.parse_args(arguments)
    skipped = {server: why for server in options.servers if (why := missing(server))}
    servers = [server for server in options.servers if server not in skipped]
    rounds = -(-len(servers) // AT_ONCE)
    # The case that is running at the end, and its healing, come on top.
    minutes = max(options.minutes / rounds - 0.3, 0.1)
    failures: list[str] = []
    with ThreadPoolExecutor(AT_ONCE) as workers:
        for server, failed, report in workers.map(
            lambda server: run(server, minutes, options.keep), servers
        ):
            print(f"== {server}: {'failed' if failed else 'no difference'}\n{report}", flush=True)
            failures += failed
    for server, why in skipped.items():
        print(f"== {server}: skipped: {why}")
    print(
        f"storm-ci: {len(servers)} servers, {len(skipped)} skipped, {len(failures)} failures",
        *failures,
        sep="\n",
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
