"""What the commands that serve have in common: a log on stderr, and where they are reached."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from databus.common.private import without_passwords

if TYPE_CHECKING:
    from databus.common.config import BootstrapConfig, DatabaseConfig

_log = logging.getLogger("databus")


def log_to_stderr() -> None:
    """Let what the rooms log be seen, with the time; libraries speak only to warn."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    _log.setLevel(logging.INFO)
    logging.captureWarnings(True)


def end_on_sigterm(code: int) -> None:
    """Let SIGTERM unwind the main thread as ctrl-C does; the exit code is ``code``."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))


def announce_relay(url: str, databases: Iterable[DatabaseConfig]) -> None:
    """Say where a relay is reached and what it serves; URLs come without their passwords."""
    served = ", ".join(f"{database.name} ({database.url})" for database in databases)
    _log.info("relay at %s serves %s", url, served)
    _log.info("status page %s/status, metrics %s/metrics", url, url)


def announce_bootstrap(url: str, config: BootstrapConfig) -> None:
    """Say where a bootstrap server is reached, what it serves and from which relays."""
    served = ", ".join(config.databases) or "every database"
    _log.info(
        "bootstrap server at %s serves %s of %s",
        url,
        served,
        without_passwords(", ".join(config.relays)),
    )
    _log.info("status %s/v1/status, metrics %s/metrics", url, url)


def announce_writer(config: BootstrapConfig) -> None:
    """Say what a log writer, which listens nowhere, reads and where it keeps it."""
    served = ", ".join(config.databases) or "every database"
    _log.info("log writer of %s of %s", served, without_passwords(", ".join(config.relays)))
    _log.info("logs in %s", config.data_dir)
