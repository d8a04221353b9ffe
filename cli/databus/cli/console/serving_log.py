"""Shared by the commands that serve: the log on stderr, the first start, the announcement."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from databus.common.processes import server_log

if TYPE_CHECKING:
    from databus.common.config import BootstrapConfig, DatabaseConfig
    from databus.common.sink_config import SinkConfig

NO_NUMBA = "DATABUS_NO_NUMBA"
COMPILE_FIRST = "DATABUS_COMPILE_FIRST"
"""Set to 1: a first start compiles the kernels before it serves, as processes of tests do."""

_log = logging.getLogger("databus")


def log_to_stderr(form: str) -> None:
    """Log to stderr, in this process and its children.

    Raises:
        ConfigError: the format is neither text nor json.
    """
    os.environ[server_log.LOG_FORMAT] = form
    server_log.log_to_stderr()


def end_on_sigterm(code: int) -> None:
    """Make SIGTERM unwind the main thread as ctrl-C does; the exit code is ``code``."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))


@contextlib.contextmanager
def compiled_kernels() -> Iterator[None]:
    """Serve in this block from the first second on, also before the kernels are compiled.

    On the first start after an installation this process and its children run the kernels as plain
    Python, while another process compiles them.  Then the server ends as by SIGTERM, and the same
    command starts again in this process with compiled kernels: clients reconnect and resume.
    The rooms' modules must be imported inside.
    """
    if os.environ.get(NO_NUMBA) or os.environ.get(COMPILE_FIRST):
        yield
        return
    from databus.common.compiled.kernel_cache import is_compiled

    if is_compiled():
        yield
        return
    _log.info(
        "compiling loops for this processor: once after an installation, up to two minutes; "
        "the server runs meanwhile, more slowly, and restarts itself at the end"
    )
    # Started by this thread: the child ends with the thread that made it.
    module = "databus.common.compiled.kernel_cache"
    compiler = subprocess.Popen([sys.executable, "-m", module, str(os.getpid())])
    os.environ[NO_NUMBA] = "1"
    is_restart = threading.Event()

    def wait() -> None:
        if compiler.wait() < 0:
            return  # A signal ended it: this server ends too.
        if compiler.returncode:
            _log.error(
                "the loops could not be compiled (exit code %s), so the server stays slow. "
                "Run `python -m %s` to see the error",
                compiler.returncode,
                module,
            )
        elif not is_ended.is_set():
            is_restart.set()
            os.kill(os.getpid(), signal.SIGTERM)

    is_ended = threading.Event()
    threading.Thread(target=wait, name="compiler", daemon=True).start()
    try:
        yield
    except SystemExit:  # SIGTERM raises it before the server serves.
        if not is_restart.is_set():
            raise
    finally:
        is_ended.set()
        compiler.kill()
    if is_restart.is_set():
        _log.info("the loops are compiled; restarting")
        del os.environ[NO_NUMBA]
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def announce_relay(url: str, databases: Iterable[DatabaseConfig]) -> None:
    """Log a relay's address and databases; URLs come without their passwords."""
    served = ", ".join(f"{database.name} ({database.url})" for database in databases)
    _log.info("relay at %s serves %s", url, served)
    _log.info("status page %s/status, metrics %s/metrics", url, url)


def announce_bootstrap(url: str, config: BootstrapConfig) -> None:
    """Log a bootstrap server's address, its databases and its relays."""
    served = ", ".join(config.databases) or "every database"
    _log.info(
        "bootstrap server at %s serves %s of %s",
        url,
        served,
        ", ".join(map(str, config.relays)),
    )
    _log.info("status %s/v1/status, metrics %s/metrics", url, url)


def announce_sink(config: SinkConfig) -> None:
    """Log what a sink reads, and its kind."""
    _log.info(
        "sink %s of kind %s reads %s of %s",
        config.name,
        ", ".join(config.kinds),
        config.database,
        ", ".join(map(str, config.relays)),
    )


def announce_writer(config: BootstrapConfig) -> None:
    """Log what a log writer reads, and its folder; it has no address."""
    served = ", ".join(config.databases) or "every database"
    _log.info("log writer of %s of %s", served, ", ".join(map(str, config.relays)))
    _log.info("logs in %s", config.data_dir)
