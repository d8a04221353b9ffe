"""``python -m tests.storm --db mariadb --seed 1 --minutes 2``: statements at random, compared."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import secrets
import sys
import tempfile
from pathlib import Path

from tests.storm import script, servers
from tests.storm.storm import Storm, replayed


def main(arguments: list[str]) -> int:
    """Exit code 1: something differed, or the stream stalled."""
    parser = argparse.ArgumentParser(prog="storm", description=__doc__)
    parser.add_argument(
        "--db", default="mariadb", choices=["mariadb", "mysql", "postgres", "sqlite"]
    )
    parser.add_argument("--server", help="another version: a name of scripts/servers.sh")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; 0: a fresh one")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--statements", type=int, default=150, help="in one case")
    parser.add_argument("--cases", type=int, default=0, help="end after so many; 0: by the time")
    parser.add_argument("--keep", type=Path, default=Path("var/storm"), help="minimal scripts")
    parser.add_argument("--failures", type=int, default=1000, help="end after so many")
    parser.add_argument("--shrink-s", type=float, default=60.0, help="spent on a failed case")
    parser.add_argument("--no-restarts", action="store_true", help="leave the server running")
    parser.add_argument("--spark", action="store_true", help="have Spark merge segments")
    parser.add_argument("--without", default="", help="productions, with commas between them")
    parser.add_argument("--replay", type=Path, help="run a stored script")
    options = parser.parse_args(arguments)
    faulthandler.enable()  # A signal leaves the stack of each thread.
    logging.basicConfig(level=logging.CRITICAL if not options.replay else logging.WARNING)
    sys.setswitchinterval(0.0005)
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        Path(folder).chmod(0o755)
        if options.server:
            options.db = servers.use(options.server, Path(folder))
        if options.replay:
            return replayed(options.db, Path(folder), script.read(options.replay))
        seed = options.seed or secrets.randbelow(10**9) + 1
        with Storm(options.db, Path(folder), options.keep) as storm:
            storm.most_failures, storm.shrink_s = options.failures, options.shrink_s
            storm.without = {name.strip() for name in options.without.split(",")}
            storm.restarts = not options.no_restarts
            if options.server:
                storm.server = f"--server {options.server}"
            if options.spark:
                storm.use_spark()
            storm.run(seed, options.minutes * 60, options.statements, options.cases)
            print(storm.report())
            return 0 if storm.is_clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
