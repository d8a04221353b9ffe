"""``python -m tests.storm.ci``: the storm over several servers at once, with fresh seeds.

Each server has a process of its own.  Its report is printed when it ends: seeds, statements,
comparisons, suspended tables by reason, and the minimal script of each case that failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SERVERS = ("mariadb", "mysql", "postgres", "sqlite")
"""What is run: servers of ``--db``, or names of scripts/servers.sh such as ``mysql-8.0.15``."""
AT_ONCE = 2
_LEFT_OUT = "coverage ("
_SHRINK_S = 40


def run(server: str, minutes: float, keep: Path) -> tuple[str, int, str]:
    """The server's name, the exit code of its storm, and what people need of its report."""
    option = "--server" if "-" in server else "--db"
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.storm", option, server, "--minutes", f"{minutes}",
            "--shrink-s", f"{_SHRINK_S}", "--keep", str(keep),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    report, _, rest = done.stdout.partition(_LEFT_OUT)
    never = [line for line in rest.splitlines() if line.startswith(("never:", "Traceback"))]
    return server, done.returncode, "\n".join([report.rstrip(), *never])


def main(arguments: list[str]) -> int:
    """Exit code 1: the storm of one server failed."""
    parser = argparse.ArgumentParser(prog="storm-ci", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="for all servers together")
    parser.add_argument("--keep", type=Path, default=Path("var/storm"), help="minimal scripts")
    parser.add_argument("servers", nargs="*", default=SERVERS)
    options = parser.parse_args(arguments)
    rounds = -(-len(options.servers) // AT_ONCE)
    # The case that is running at the end, and its healing, come on top.
    minutes = max(options.minutes / rounds - 0.3, 0.1)
    failed = []
    with ThreadPoolExecutor(AT_ONCE) as workers:
        for server, code, report in workers.map(
            lambda server: run(server, minutes, options.keep), options.servers
        ):
            print(f"== {server}: {'failed' if code else 'no difference'}\n{report}", flush=True)
            if code:
                failed.append(server)
    print(f"storm-ci: {len(failed)} of {len(options.servers)} servers failed {' '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
