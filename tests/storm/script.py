"""A recorded case: which session sends which statement, and where everything is compared."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

CHECK = "check"
RESTART_RELAY = "restart relay"
RESTART_SERVER = "restart server"
KILL_SERVER = "kill server"
SET_UP = "set up"
"""The production of statements that come before the relay starts."""
START_LATE = "start late replica"
START_BOOTSTRAP = "start bootstrap"
RESTART_BOOTSTRAP = "restart bootstrap"
MERGE = "merge"
RESET_LOGS = "reset logs"
"""The server forgets its binlog: the stream ends by name, and with it the case."""
ACTIONS = {
    CHECK, RESTART_RELAY, RESTART_SERVER, KILL_SERVER, START_LATE, START_BOOTSTRAP,
    RESTART_BOOTSTRAP, MERGE, RESET_LOGS,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One statement of one session; ``session`` -1: ``sql`` is one of ACTIONS."""

    session: int
    sql: str
    production: str

    @property
    def is_action(self) -> bool:
        return self.session < 0

    def __str__(self) -> str:
        if self.is_action:
            return f"-- {self.sql}"
        return f"/* s{self.session} */ {self.sql};".replace("\r", "\\r").replace("\n", "\\n")


def check() -> Step:
    """Compare here."""
    return Step(-1, CHECK, CHECK)


def written(steps: Iterable[Step], path: Path) -> None:
    """Store a case: one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(dataclasses.asdict(step)) + "\n" for step in steps))


def read(path: Path) -> list[Step]:
    """The case in a file that ``written`` made."""
    return [Step(**json.loads(line)) for line in path.read_text().splitlines()]
