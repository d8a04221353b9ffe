"""How a running relay reads a changed configuration, and what the change means.

``changes`` is pure; ``ReloadSocket`` is the relay's listening socket in its data folder, and
``ask_reload`` is the client of ``databus reload``.  The supervisor starts and ends
processes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from databus.common.config import Config, DatabaseConfig, RelayConfig
from databus.common.errors import ConfigError, DatabusError, ServerUnavailable, from_problem
from databus.common.errors import to_problem as problem_of
from databus.common.private import make_folder
from databus.relay.ring.data_folder import SocketName

SOCKET_NAME = "relay.sock"
ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class ConfigChanges:
    """What must be done about the databases to apply a new configuration."""

    added: tuple[DatabaseConfig, ...] = ()
    changed: tuple[DatabaseConfig, ...] = ()
    removed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, list[str]]:
        """The names."""
        return {
            "added": [database.name for database in self.added],
            "changed": [database.name for database in self.changed],
            "removed": list(self.removed),
        }


def changes(old: Config, new: Config) -> ConfigChanges:
    """What must be done to go from ``old`` to ``new``.

    Raises:
        ConfigError: it cannot be done without a restart, or leaves nothing to serve.
    """
    if new.relay is None or not new.database:
        raise ConfigError("a relay needs [relay] and at least one [[database]]; nothing is changed")
    before = old.relay or RelayConfig()
    fixed = [
        key for key in RelayConfig.model_fields if getattr(before, key) != getattr(new.relay, key)
    ]
    if fixed:
        raise ConfigError(
            f"[relay] {', '.join(fixed)} cannot change while the relay runs: restart it; "
            f"nothing is changed"
        )
    if old.cluster != new.cluster:
        raise ConfigError(
            "[cluster] cannot change while the relay runs: restart it; nothing is changed"
        )
    known = {database.name: database for database in old.database}
    names = {database.name for database in new.database}
    return ConfigChanges(
        added=tuple(d for d in new.database if d.name not in known),
        changed=tuple(d for d in new.database if d.name in known and d != known[d.name]),
        removed=tuple(name for name in known if name not in names),
    )


class ReloadSocket:
    """Answers each connection with the outcome of one reload, as one line of JSON.

    Owner: the supervisor's loop; only users who may write to the data folder can connect.
    """

    def __init__(self, data_dir: Path, reload: Callable[[], Awaitable[ConfigChanges]]) -> None:
        self._path = data_dir / SOCKET_NAME
        self._reload = reload
        self._name: SocketName | None = None
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        make_folder(self._path.parent)
        self._path.unlink(missing_ok=True)
        self._name = SocketName(self._path)
        self._server = await asyncio.start_unix_server(self._answer, self._name.path)
        self._path.chmod(0o600)
        return self

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            document: dict[str, Any] = (await self._reload()).to_json()
        except DatabusError as error:
            document = {"problem": problem_of(error)}
        try:
            writer.write(json.dumps(document).encode() + b"\n")
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        if self._name is not None:
            self._path.unlink(missing_ok=True)
            self._name.close()


async def ask_reload(data_dir: Path) -> dict[str, list[str]]:
    """Make the relay over ``data_dir`` read its configuration; the names of what has changed.

    Raises:
        ServerUnavailable: no relay runs over this folder.
        ConfigError: the relay continues with its old configuration.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            with SocketName(data_dir / SOCKET_NAME) as name:
                reader, writer = await asyncio.open_unix_connection(name.path)
            line = await reader.readline()
            writer.close()
    except (OSError, DatabusError, TimeoutError) as error:
        raise ServerUnavailable(
            f"no relay over {data_dir} answers ({type(error).__name__})"
        ) from error
    if not line:
        raise ServerUnavailable(f"the relay over {data_dir} ended before it answered")
    document = json.loads(line)
    if "problem" in document:
        raise from_problem(document["problem"])
    return {name: list(document[name]) for name in ("added", "changed", "removed")}
