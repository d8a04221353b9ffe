"""The processes of the bootstrap room: log writer, server, applier, or the three together.

Writer and server share one process by default; with ``writers`` above 1 the writers are children
(``writer_processes``).  The applier is a child, because it needs memory of its own and may start a
Java machine.  Each can also run alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from databus.bootstrap.http.bootstrap_server import serve_bootstrap
from databus.bootstrap.log.configured_stores import Stores
from databus.bootstrap.merging.scratch_folders import scratch_folder, sweep
from databus.bootstrap.processes.log_writers import write_logs
from databus.bootstrap.processes.writer_processes import keep_writers, received_group
from databus.bootstrap.reading.stored_database import OpenLogs
from databus.bootstrap.runs.manifest import Store
from databus.common.access.listener_rules import require_protection
from databus.common.access.listener_tls import server_tls
from databus.common.access_config import AuthConfig, HttpConfig
from databus.common.config import BootstrapConfig, Config
from databus.common.errors import ConfigError, DatabusError, StoreBusy
from databus.common.http.admission import Admission
from databus.common.http.listening_socket import listening_socket
from databus.common.processes.server_log import log_to_stderr

if TYPE_CHECKING:
    from databus.bootstrap.merging.applier import Merges

_LOG = logging.getLogger("databus.bootstrap")

APPLIER_CHILD = """
import sys
from databus.bootstrap.processes.bootstrap_processes import applier_child
applier_child(sys.argv[1])
"""
APPLIER_RESTART_S = 5.0
APPLIED_AT_ONCE = 4
STOP_S = 10.0

Report = Callable[[str, Mapping[str, Any]], None]
Started = Callable[[str], None]
ReadAgain = Callable[[], Config]


def _unannounced(url: str) -> None:
    """The default: the URL is not announced."""


def log_merge(database: str, record: Mapping[str, Any]) -> None:
    """Write what a merge did to the log."""
    _LOG.info(
        "%s: %s up to %s: %s of %s rows in %.1f s",
        database,
        record["kind"],
        record["stop"],
        record["rows_out"],
        record["rows_in"],
        record["seconds"],
    )


def bootstrap_config(config: Config | BootstrapConfig) -> BootstrapConfig:
    """The ``[bootstrap]`` section.

    Raises:
        ConfigError: there is none.
    """
    section = config if isinstance(config, BootstrapConfig) else config.bootstrap
    if section is None:
        raise ConfigError("the configuration has no [bootstrap] section")
    return section


def http_config(config: Config | BootstrapConfig) -> HttpConfig:
    """The ``[http]`` section; a ``[bootstrap]`` section alone has none.

    Raises:
        ConfigError: the files of TLS cannot be used, or the listener needs it and has none.
    """
    http = config.http if isinstance(config, Config) else HttpConfig()
    auth = config.auth if isinstance(config, Config) else AuthConfig()
    require_protection(bootstrap_config(config).listen, http, auth)
    server_tls(http.tls)
    return http


def _admission(config: Config | BootstrapConfig, read_again: ReadAgain | None) -> Admission:
    """Who may read; at SIGHUP the ``[auth]`` section is read again.  To be called in the loop."""
    admission = Admission(config.auth if isinstance(config, Config) else AuthConfig())
    if read_again is None:
        return admission

    def reload() -> None:
        try:
            new = read_again()
            http_config(new)
            admission.configure(new.auth)
        except DatabusError as error:
            _LOG.error("not reloaded: %s", error.message)
        else:
            _LOG.info("reloaded: [auth]")

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    return admission


def run_bootstrap(
    config: Config | BootstrapConfig,
    *,
    apply: bool = True,
    started: Started = _unannounced,
    read_again: ReadAgain | None = None,
) -> None:
    """Writer, server and (with ``apply``) applier, until SIGTERM or SIGINT.

    ``started`` is called with the server's URL once its address is bound.  ``read_again`` returns
    the current configuration, for SIGHUP: the callers and their grants are taken from it.

    Raises:
        ServerUnavailable: the address is taken.
        StoreBusy: another process writes one of the logs.
    """
    section, http = bootstrap_config(config), http_config(config)

    async def body(stop: asyncio.Event) -> None:
        logs = OpenLogs(writes=section.writers == 1)
        listener = listening_socket(section.listen)
        started(_url_of(listener, http))
        admission = _admission(config, read_again)
        serving = serve_bootstrap(section, listener, stop, logs, http, admission)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_until(stop, _write(section, logs, stop)))
                group.create_task(_until(stop, serving))
                if apply:
                    group.create_task(_keep_applier(section, stop))
        finally:
            logs.close()

    _run(body)


def run_writer(config: Config | BootstrapConfig) -> None:
    """The log writer alone, until SIGTERM or SIGINT.

    Raises:
        StoreBusy: another process writes one of the logs.
    """
    section = bootstrap_config(config)

    async def body(stop: asyncio.Event) -> None:
        logs = OpenLogs(writes=True)
        try:
            await _write(section, logs, stop)
        finally:
            logs.close()

    _run(body)


async def _write(config: BootstrapConfig, logs: OpenLogs, stop: asyncio.Event) -> None:
    """Write the logs: here, or in as many processes as are configured."""
    if config.writers == 1:
        await write_logs(config, logs, stop)
    else:
        await keep_writers(config, logs, stop)


def writer_child(number: int) -> None:
    """A log writer's own process, which gets its configuration and its databases at stdin."""
    received = received_group(number)
    if received is None:
        return
    config, group = received
    log_to_stderr()

    async def body(stop: asyncio.Event) -> None:
        logs = OpenLogs(writes=True)
        try:
            await write_logs(config, logs, stop, group)
        finally:
            logs.close()

    _run(body)


def run_server(
    config: Config | BootstrapConfig,
    *,
    started: Started = _unannounced,
    read_again: ReadAgain | None = None,
) -> None:
    """The server alone, until SIGTERM or SIGINT; the arguments are those of ``run_bootstrap``.

    Raises:
        ServerUnavailable: the address is taken.
    """
    section, http = bootstrap_config(config), http_config(config)

    # With a store on S3, its log is a copy of what the writer of the cluster has not sealed.
    copies = section.cluster and bool(section.store)

    async def body(stop: asyncio.Event) -> None:
        logs = OpenLogs(writes=copies)
        listener = listening_socket(section.listen)
        started(_url_of(listener, http))
        admission = _admission(config, read_again)
        try:
            async with asyncio.TaskGroup() as group:
                if copies:
                    group.create_task(_until(stop, write_logs(section, logs, stop, leads=False)))
                serving = serve_bootstrap(section, listener, stop, logs, http, admission)
                group.create_task(_until(stop, serving))
        finally:
            logs.close()

    _run(body)


def run_applier(
    config: Config | BootstrapConfig,
    *,
    every_s: float | None = None,
    full: bool = False,
    report: Report = log_merge,
) -> None:
    """The applier: one round, or with ``every_s`` round after round, with one session of Spark.

    Databases are merged at the same time, and one that fails does not stop the others: its error
    (the first, if there are more) is raised when all are done, or logged with ``every_s``.  The
    same goes for a store that cannot list its databases.
    ``report`` is called after each merge.  With ``full`` every base is rewritten.

    Raises:
        MissingDependency: the configuration requires Spark, and there is no Java.
        StoreBusy: another applier is running (one round; otherwise it waits for the other to end).
    """
    section = bootstrap_config(config)
    stores = Stores(section)
    with scratch_folder(section.data_dir) as scratch, _merges(section, scratch) as merges:
        while True:
            began_s = time.monotonic()
            try:
                begun = stores.begun()
            except (DatabusError, OSError) as refused:
                if every_s is None:
                    raise
                _LOG.warning("apply: %s", refused)
                begun = {}
            errors = apply_round(section, begun, merges, full=full, report=report)
            for name, error in errors.items():
                # In a cluster another server's applier is at work.
                is_usual = section.cluster and isinstance(error, StoreBusy)
                level = logging.DEBUG if is_usual else logging.WARNING
                _LOG.log(level, "apply of %s: %s", name, error.message)
            if every_s is None and errors:
                raise next(iter(errors.values()))
            if every_s is None:
                return
            time.sleep(max(0.0, every_s - (time.monotonic() - began_s)))


@contextlib.contextmanager
def _merges(section: BootstrapConfig, scratch: Path) -> Iterator[Merges]:
    """What does the tasks of merges, as configured: Spark, or this process."""
    # Imported only where they are used: Spark takes a second, pyarrow a part of one.
    from databus.bootstrap.merging.process_merges import ProcessMerges, has_java

    is_chosen = section.merge_with == "process"
    is_local = section.spark_master.startswith("local")
    if is_chosen or (section.merge_with == "auto" and is_local and not has_java()):
        if is_chosen:
            _LOG.info('the applier merges in its own process: merge_with = "process"')
        else:
            _LOG.warning(
                "there is no Java: the applier merges in its own process, on one core. For Spark, "
                "install Java 17 or newer (on Debian: apt install openjdk-17-jre-headless); or "
                'set merge_with = "process" in [bootstrap]'
            )
        yield ProcessMerges(scratch)
        return
    from databus.bootstrap.merging import spark_merges

    spark = spark_merges.start_spark(
        section.spark_master, section.spark_driver_memory, scratch=scratch
    )
    try:
        yield spark_merges.SparkMerges(spark)
    finally:
        spark.stop()


def apply_round(
    config: BootstrapConfig,
    stores: Mapping[str, Store],
    merges: Merges,
    *,
    full: bool = False,
    report: Report = log_merge,
) -> dict[str, DatabusError]:
    """Apply to all stores, a few at a time; the errors of those that failed."""
    from databus.bootstrap.merging.applier import Applier

    reporting = threading.Lock()

    def apply(name: str) -> DatabusError | None:
        applier = Applier(
            stores[name],
            merges,
            name=name,
            retention_bytes=config.retention_bytes,
            retention_us=int(config.retention_time * 10**6) or None,
            retention_scns=config.retention_scns or None,
            grace_us=int(config.run_grace * 10**6),
            apply_bytes=config.apply_bytes,
        )
        try:
            for record in applier.apply(full=full):
                with reporting:
                    report(name, record)
        except DatabusError as error:
            return error
        return None

    with ThreadPoolExecutor(APPLIED_AT_ONCE, thread_name_prefix="apply") as pool:
        found = list(pool.map(apply, stores))
    return {name: error for name, error in zip(stores, found, strict=True) if error is not None}


def _url_of(listener: socket.socket, http: HttpConfig) -> str:
    host, port = listener.getsockname()[:2]
    return f"{http.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _run(body: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run ``body`` with an event that SIGTERM and SIGINT set; one error comes out as itself."""

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await body(stop)

    try:
        import uvloop

        factory: Any = uvloop.new_event_loop
    except ImportError:
        factory = None
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())
    except BaseExceptionGroup as group:
        raise _first_leaf(group) from group


def _first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _until(stop: asyncio.Event, work: Awaitable[None]) -> None:
    """Do ``work``; the others stop when it ends."""
    try:
        await work
    finally:
        stop.set()


async def _keep_applier(config: BootstrapConfig, stop: asyncio.Event) -> None:
    """Run the applier as a child and restart it when it dies; it ends with us in every case."""
    while not stop.is_set():
        try:
            what = f"ended with {await _run_applier_child(config, stop)}"
        except (OSError, RuntimeError) as error:
            # The system has no process, thread or pipe: writer and server continue without it.
            what = f"does not start: {error}"
        if not stop.is_set():
            _LOG.warning("the applier %s; it is restarted", what)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), APPLIER_RESTART_S)
    # The applier ends at once at SIGTERM.
    await asyncio.to_thread(sweep, config.data_dir)


async def _run_applier_child(config: BootstrapConfig, stop: asyncio.Event) -> int:
    """The exit code of an applier that died, or that we ended because we stop.

    Raises:
        OSError: the system gives no process or no descriptor.
        RuntimeError: it gives no thread.
    """
    read_fd, write_fd = os.pipe()
    try:
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", APPLIER_CHILD, _shown(config), stdin=read_fd
            )
        finally:
            os.close(read_fd)
        # Not in the arguments, which every user of the machine can read.
        _send(write_fd, _secrets(config))
        ended = asyncio.create_task(child.wait())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
            await asyncio.wait({ended}, timeout=STOP_S)
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        return await ended
    finally:
        os.close(write_fd)  # this ends a child that still runs


def _shown(config: BootstrapConfig) -> str:
    """The applier's configuration in a form without secrets; it has no relays."""
    return config.model_copy(update={"relays": ()}).model_dump_json()


def _send(fd: int, line: bytes) -> None:
    # It does not block: the pipe is empty, and has room for far more.  A child that is dead
    # already does not read; the caller notices its end elsewhere.
    with contextlib.suppress(BrokenPipeError):
        os.write(fd, line)


def _secrets(config: BootstrapConfig) -> bytes:
    """The secrets that a printed configuration leaves out: the first line of the child's stdin."""
    s3 = config.s3
    document = {
        "secret_key": s3.secret_key.get_secret_value(),
        "session_token": s3.session_token.get_secret_value(),
    }
    return json.dumps(document).encode() + b"\n"


def _with_secrets(config: BootstrapConfig, line: bytes) -> BootstrapConfig:
    document = {name: SecretStr(value) for name, value in json.loads(line).items()}
    return config.model_copy(update={"s3": config.s3.model_copy(update=document)})


def _end_with_parent() -> None:
    """Exit when the process at the other end of our stdin is gone."""

    def watch() -> None:
        # Not through the buffer: Python could not exit while a thread waits in it.
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def applier_child(document: str) -> None:
    """The applier's child process, with the section as JSON."""
    secrets = sys.stdin.buffer.readline()
    if not secrets:
        return  # the parent was gone before it sent anything
    _end_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_to_stderr(level=logging.WARNING)
    config = _with_secrets(BootstrapConfig.model_validate(json.loads(document)), secrets)
    try:
        run_applier(config, every_s=config.apply_every)
    except DatabusError as error:
        _LOG.error("%s: %s (%s)", error.code, error.message, error.hint)
        sys.exit(1)
