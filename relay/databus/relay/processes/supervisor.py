"""The relay's parent process: one fetcher process per database and N HTTP workers.

It binds the sockets, makes the wake-ups, starts the children and restarts each that dies,
with back-off, while the others continue.  When it reads the configuration again it starts and
ends the fetchers of added and removed databases, and notifies the workers.  It reads no source
and serves no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from databus.common.access.listener_rules import require_protection
from databus.common.access.listener_tls import server_tls
from databus.common.access_config import AuthConfig
from databus.common.config import Config, DatabaseConfig, RelayConfig
from databus.common.errors import ConfigError, DatabusError, ServerUnavailable
from databus.common.http.listening_socket import listening_socket
from databus.relay.processes.child_process import MODULE as CHILD_MODULE
from databus.relay.processes.process_handover import HANDOVER_FLAG, Handover
from databus.relay.processes.reload import ConfigChanges, ReloadSocket, changes
from databus.relay.processes.supervised_child import Child
from databus.relay.processes.wakeup import make_wakeup
from databus.relay.processes.worker_channel import SupervisorChannel
from databus.relay.ring.folder_locks import lock_data_dir

if TYPE_CHECKING:
    from databus.relay.cluster.cluster_member import ClusterMember
    from databus.relay.cluster.database_role import DatabaseRole

FETCHER_MODULE = "databus.relay.processes.fetcher"
WORKER_MODULE = "databus.relay.http.relay_server"
RESTART_FIRST_S = 0.1
RESTART_MOST_S = 10.0
STEADY_S = 10.0
STOP_S = 10.0
HANDOVER_THREAD = "handover"
TAKEN_S = 2.0
TAKEN_POLL_S = 0.05

_log = logging.getLogger(__name__)


def free_address(address: str) -> str:
    """``address`` with its port chosen, after a check that no other process listens there.

    The children of a relay that was killed a moment ago get ``TAKEN_S`` to die.

    Raises:
        ServerUnavailable: another process listens there.
    """
    until_s = time.monotonic() + TAKEN_S
    while True:
        try:
            with listening_socket(address) as probe:
                host = address.rpartition(":")[0]
                return f"{host}:{probe.getsockname()[1]}"
        except ServerUnavailable:
            if time.monotonic() >= until_s:
                raise
        time.sleep(TAKEN_POLL_S)


class Supervisor:
    """Starts and restarts the relay's processes, and adds and removes databases.

    Invariants:
        I1. There is at most one process per child: the next starts once the last is reaped.
        I2. A child that dies does not end another.
        I3. No child outlives this process.
        I4. What ``reload`` does to one database affects no process of another database, and no
            worker; a configuration that it refuses changes nothing.

    Owner: one event loop in the main thread, because the kernel ties the children to the thread
    that started them.
    Raises: from the constructor ServerUnavailable if the address is taken, StoreBusy if
        another relay has the folder.
    """

    def __init__(
        self,
        config: Config,
        *,
        read_again: Callable[[], Config] | None = None,
        jitter: random.Random | None = None,
    ) -> None:
        if config.relay is None:
            raise ConfigError("the configuration has no [relay] section")
        if not config.database:
            raise ConfigError("the configuration has no [[database]] section to serve")
        self.config = config
        server_tls(config.http.tls)  # The workers use it; a wrong file is an error here.
        self.relay: RelayConfig = config.relay
        require_protection(config.relay.listen, config.http, config.auth)
        self._read_again = read_again
        self._jitter = jitter or random.Random()
        self._asked_to_stop = asyncio.Event()
        self._stopping = asyncio.Event()
        self._reloading = asyncio.Lock()
        self._group: asyncio.TaskGroup | None = None
        self.address = free_address(self.relay.listen)
        # Before anything in the folder is changed: two relays would share their files.
        self._lock_fd = lock_data_dir(self.relay.data_dir, wait_s=TAKEN_S)
        self._sockets: list[socket.socket] = []
        self._wakeups: dict[str, list[int]] = {}
        self._workers: list[Child] = []
        self._fetchers: dict[str, Child] = {}
        self._member: ClusterMember | None = None
        try:
            for number in range(self.relay.workers):
                self._sockets.append(listening_socket(self.address, reuse_port=True))
                self._workers.append(self._worker(number))
            for name, fds in self._make_wakeups(config.database).items():
                self._make_fetcher(name, fds)
        except BaseException:
            self._close()
            raise

    def _worker(self, number: int) -> Child:
        def handover() -> Handover:
            child.channel = SupervisorChannel()
            return Handover(
                self.config,
                worker=number,
                listen_fd=self._sockets[number].fileno(),
                wakeups={name: fds[number] for name, fds in self._wakeups.items()},
                channel_fd=child.channel.worker_fd,
            )

        child = Child(f"worker {number}", WORKER_MODULE, handover)
        child.wanted.set()
        return child

    def _make_wakeups(self, databases: Iterable[DatabaseConfig]) -> dict[str, list[int]]:
        """A wake-up for each database and worker.

        Raises:
            ServerUnavailable: the system does not give enough; none is left open.
        """
        made: dict[str, list[int]] = {database.name: [] for database in databases}
        try:
            for fds in made.values():
                for _ in range(self.relay.workers):
                    fds.append(make_wakeup())
        except OSError as error:
            for fd in itertools.chain.from_iterable(made.values()):
                os.close(fd)
            raise ServerUnavailable(
                f"no descriptors for {', '.join(made)}: {error.strerror}; nothing is changed"
            ) from error
        return made

    def _make_fetcher(self, name: str, fds: list[int]) -> Child:
        self._wakeups[name] = fds

        def handover() -> Handover:
            if self.config.cluster is not None:
                child.channel = SupervisorChannel()
            return Handover(
                self.config,
                database=name,
                wakeup_fds=tuple(fds),
                channel_fd=child.channel.worker_fd if child.channel is not None else -1,
                role=child.role,
                lease_fd=child.lease_fd,
            )

        child = self._fetchers[name] = Child(f"fetcher {name}", FETCHER_MODULE, handover)
        if self.config.cluster is None:
            child.wanted.set()
        return child

    def _join_cluster(self) -> None:
        if self.config.cluster is None:
            return
        # Not before: they load what a supervisor without a cluster does not need.
        from databus.relay.cluster.cluster_member import ClusterMember
        from databus.relay.processes.cluster_host import SupervisedCluster

        host = SupervisedCluster(
            self.relay.data_dir,
            lambda: [database.name for database in self.config.database],
            self._is_idle,
            self._set_role,
        )
        self._member = ClusterMember(self.config.cluster, host)
        self._member.start()

    def _is_idle(self, name: str) -> bool:
        child = self._fetchers.get(name)
        return child is None or not (child.wanted.is_set() or child.is_busy)

    def _set_role(self, name: str, role: DatabaseRole | None, lease_fd: int) -> None:
        child = self._fetchers.get(name)
        if child is not None:
            child.take_role(role, lease_fd)
        elif lease_fd >= 0:
            os.close(lease_fd)

    @property
    def children(self) -> list[Child]:
        """All children."""
        return [*self._fetchers.values(), *self._workers]

    @property
    def pids(self) -> dict[str, int]:
        """The processes that run now."""
        running = {child.name: child.process for child in self.children}
        return {
            name: process.pid
            for name, process in running.items()
            if process is not None and process.returncode is None
        }

    @property
    def url(self) -> str:
        """The URL of the workers."""
        host, _, port = self.address.rpartition(":")
        return f"{self.config.http.scheme}://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"

    def stop(self) -> None:
        """Let ``run`` leave the cluster, end all children and return."""
        self._asked_to_stop.set()

    async def run(self) -> None:
        """Start all children and keep them running until ``stop``."""
        try:
            async with ReloadSocket(self.relay.data_dir, self.reload):
                async with asyncio.TaskGroup() as group:
                    self._group = group
                    for child in self.children:
                        group.create_task(self._supervise(child))
                    self._join_cluster()
                    group.create_task(self._wait_stop())
        finally:
            self._group = None
            if self._member is not None:
                await asyncio.to_thread(self._member.close)
            self._close()

    async def _wait_stop(self) -> None:
        await self._asked_to_stop.wait()
        if self._member is not None:
            # The workers serve meanwhile: clients read on until another relay leads.
            await asyncio.to_thread(self._member.leave)
        self._stopping.set()

    def _close(self) -> None:
        for listener in self._sockets:
            listener.close()
        for name in list(self._wakeups):
            self._close_wakeups(name)
        self._sockets = []
        os.close(self._lock_fd)

    def _close_wakeups(self, name: str) -> None:
        for fd in self._wakeups.pop(name):
            os.close(fd)

    # -- adding and removing databases --

    async def reload(self) -> ConfigChanges:
        """Read the configuration again and apply it; returns what has been done.

        Raises:
            ConfigError: it is wrong, or needs a restart; nothing was changed.
            ServerUnavailable: there are no descriptors for it; nothing was changed.
        """
        if self._read_again is None:
            raise ConfigError("this relay was not started from a file; nothing is changed")
        async with self._reloading:
            new = await asyncio.to_thread(self._read_again)
            found = changes(self.config, new)
            require_protection(self.relay.listen, self.config.http, new.auth)
            wakeups = self._make_wakeups(found.added)
            has_new_auth = new.auth != self.config.auth
            self.config = self.config.model_copy(
                update={"database": new.database, "auth": new.auth}
            )
            if has_new_auth:
                self._tell_workers("auth", new.auth)
            for database in found.added:
                fetcher = self._make_fetcher(database.name, wakeups[database.name])
                self._tell_workers("add", database, self._wakeups[database.name])
                if self._group is not None and not self._stopping.is_set():
                    self._group.create_task(self._supervise(fetcher))
            for database in found.changed:
                self._tell_workers("change", database)
                self._restart(self._fetchers[database.name])
            for name in found.removed:
                self._tell_workers("remove", name)
            await asyncio.gather(*(self._remove(name) for name in found.removed))
        _log.info("reloaded: %s", ", ".join(f"{k} {v}" for k, v in found.to_json().items() if v))
        return found

    async def reload_or_log(self) -> None:
        """``reload`` at a signal, without a caller that waits."""
        try:
            await self.reload()
        except DatabusError as error:
            _log.error("not reloaded: %s", error.message)

    def _tell_workers(
        self,
        what: str,
        about: DatabaseConfig | AuthConfig | str,
        wakeups: list[int] | None = None,
    ) -> None:
        for number, worker in enumerate(self._workers):
            channel = worker.channel
            if channel is None:
                continue  # its handover will have everything
            try:
                if isinstance(about, str):
                    channel.remove(about)
                elif isinstance(about, AuthConfig):
                    channel.set_auth(about)
                else:
                    channel.add(about, wakeups[number] if wakeups else -1)
            except OSError as error:
                _log.warning(
                    "%s did not take the message %s and is restarted: %s", worker.name, what, error
                )
                self._restart(worker)

    def _restart(self, child: Child) -> None:
        """End its process and start another at once."""
        child.again.set()

    async def _remove(self, name: str) -> None:
        child = self._fetchers.pop(name)
        child.ending.set()
        await child.ended.wait()
        self._close_wakeups(name)

    # -- keeping a child running --

    async def _supervise(self, child: Child) -> None:
        try:
            await self._keep_running(child)
        finally:
            child.ended.set()

    async def _keep_running(self, child: Child) -> None:
        delay_s = RESTART_FIRST_S
        while not (self._stopping.is_set() or child.ending.is_set()):
            if not child.wanted.is_set():
                await self._first_of(child.wanted, self._stopping, child.ending)
                continue
            started_s = time.monotonic()
            child.again.clear()  # the handover is put together right after
            child.is_busy = True
            try:
                what = await self._run(child)
            except (OSError, RuntimeError) as error:
                # The system has no process, thread or pipe: the other children continue.
                what = f"does not start: {error}"
            finally:
                child.is_busy = False
            if self._stopping.is_set() or child.ending.is_set():
                return
            if child.again.is_set() or time.monotonic() - started_s >= STEADY_S:
                delay_s = RESTART_FIRST_S
            if child.again.is_set():
                continue
            pause_s = delay_s * self._jitter.uniform(0.5, 1.0)
            delay_s = min(RESTART_MOST_S, delay_s * 2)
            _log.warning("%s %s; restart in %.1f s", child.name, what, pause_s)
            await self._first_of(self._stopping, child.ending, child.again, timeout_s=pause_s)

    async def _run(self, child: Child) -> str:
        """Start the child and wait for its end; returns how it ended.

        Raises:
            OSError: the system gives no process or no descriptor.
            RuntimeError: it gives no thread.
        """
        try:
            child.process = process = await self._start(child)
            try:
                code = await self._until_end(child, process)
            finally:
                _end(process, process.kill)
        finally:
            if child.channel is not None:
                child.channel.close()
                child.channel = None
        return f"(pid {process.pid}) ended with {_describe(code)}"

    async def _start(self, child: Child) -> asyncio.subprocess.Process:
        read_fd, write_fd = os.pipe()
        try:
            handover = child.handover()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                CHILD_MODULE,
                str(os.getpid()),
                child.module,
                HANDOVER_FLAG,
                str(read_fd),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(read_fd, *handover.fds),
                process_group=0,  # ctrl-C in a terminal is only for this process
            )
        except BaseException:
            os.close(write_fd)
            raise
        finally:
            os.close(read_fd)
        if child.channel is not None:
            child.channel.started()
        text = json.dumps(handover.to_json()).encode()
        # Not by a pool of threads: it queues work for which it has no thread, and does it later.
        sending = threading.Thread(
            target=_send, args=(write_fd, text), name=HANDOVER_THREAD, daemon=True
        )
        try:
            sending.start()
        except RuntimeError:
            os.close(write_fd)
            _end(process, process.kill)
            await process.wait()
            raise
        return process

    async def _first_of(
        self, *what: asyncio.Event | asyncio.Task[int], timeout_s: float | None = None
    ) -> None:
        """Wait until one of these events is set or tasks is done, or the time is over."""
        tasks = [
            asyncio.create_task(one.wait()) if isinstance(one, asyncio.Event) else one
            for one in what
        ]
        try:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task, one in zip(tasks, what, strict=True):
                if task is not one:
                    task.cancel()

    async def _until_end(self, child: Child, process: asyncio.subprocess.Process) -> int:
        """The exit code; when due, the process is ended with SIGTERM, then with SIGKILL."""
        ended = asyncio.create_task(process.wait())
        try:
            await self._first_of(ended, self._stopping, child.ending, child.again)
            if not ended.done():
                _end(process, process.terminate)
                await asyncio.wait({ended}, timeout=STOP_S)
            if not ended.done():
                _log.warning("pid %d does not end within %g s and is killed", process.pid, STOP_S)
                _end(process, process.kill)
            return await ended
        finally:
            ended.cancel()


def _send(fd: int, text: bytes) -> None:
    # A child that is dead already does not read; its end is noticed elsewhere.
    with contextlib.suppress(BrokenPipeError), os.fdopen(fd, "wb") as pipe:
        pipe.write(text)


def _end(process: asyncio.subprocess.Process, how: Callable[[], None]) -> None:
    # It may have ended without having been waited for yet.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            how()


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


async def supervise(
    config: Config,
    started: Callable[[Supervisor], None],
    read_again: Callable[[], Config] | None = None,
) -> None:
    """Run the relay until SIGTERM or SIGINT; ``started`` is called once the address is bound.

    At SIGHUP it reads its configuration again.
    """
    supervisor = Supervisor(config, read_again=read_again)
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = loop.create_task(supervisor.reload_or_log())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, reload)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop)
    started(supervisor)
    await supervisor.run()


def run_relay(
    config: Config,
    started: Callable[[Supervisor], None] = lambda supervisor: None,
    read_again: Callable[[], Config] | None = None,
) -> None:
    """The relay's process: returns after SIGTERM or SIGINT, when all children have ended.

    ``read_again`` returns the current configuration, for SIGHUP and ``databus reload``.

    Raises:
        ConfigError: there is nothing to serve.
        ServerUnavailable: the address is taken.
    """
    asyncio.run(supervise(config, started, read_again))
