"""Private ZooKeeper servers: Debian's jars, free ports, folders of the test."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Self

import pytest

from databus.cli.demo.private_servers import free_port
from tests.support.certificates import Authority
from tests.support.waiting import eventually_sync

JAR = Path("/usr/share/java/zookeeper.jar")
_NETTY = ":".join(str(JAR.with_name(f"netty-{part}.jar")) for part in ("codec", "resolver"))
"""For TLS: the other jar names the rest of Netty's."""
_SETTINGS = """\
tickTime=250
initLimit=20
syncLimit=20
dataDir={folder}
clientPort={port}
clientPortAddress=127.0.0.1
admin.enableServer=false
maxClientCnxns=0
4lw.commands.whitelist=ruok,srvr
"""
_LOGGING = (
    "log4j.rootLogger=WARN, out\nlog4j.appender.out=org.apache.log4j.ConsoleAppender\n"
    "log4j.appender.out.layout=org.apache.log4j.PatternLayout\n"
    "log4j.appender.out.layout.ConversionPattern=%d %p %m%n\n"
)


class ZooKeeperServer:
    """One server, alone or of an ensemble.

    Owner: one test process.  A session lasts 0.5 to 5 s, by ticks of 250 ms.
    """

    def __init__(
        self,
        folder: Path,
        number: int = 1,
        ensemble: str = "",
        authority: Authority | None = None,
    ) -> None:
        """``ensemble`` are the settings with all of its servers, this one by its ``number``.

        With an ``authority`` its clients must use TLS with certificates of their own.
        """
        if not JAR.exists() or shutil.which("java") is None:
            pytest.skip("no ZooKeeper: apt-get install zookeeper")
        folder.mkdir(parents=True)
        self._folder = folder
        self.port = free_port()
        self.hosts = f"127.0.0.1:{self.port}"
        self.coordination = {"zookeeper": self.hosts}
        (folder / "myid").write_text(str(number))
        settings = _SETTINGS.format(folder=folder, port=self.port) + ensemble
        if authority is not None:
            settings += self._with_tls(authority)
        (folder / "zoo.cfg").write_text(settings)
        (folder / "log4j.properties").write_text(_LOGGING)
        self.start()

    def _with_tls(self, authority: Authority) -> str:
        """The settings of a secure port beside the other, which serves ``mode`` alone."""
        secure = free_port()
        self.hosts = f"localhost:{secure}"
        self.coordination = {"zookeeper": self.hosts}
        files, both = authority.issue("zookeeper"), self._folder / "zookeeper.pem"
        both.write_bytes(files.key.read_bytes() + files.certificate.read_bytes())
        return (
            "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\n"
            f"secureClientPort={secure}\nsecureClientPortAddress=127.0.0.1\n"
            f"ssl.keyStore.location={both}\nssl.keyStore.type=PEM\n"
            f"ssl.trustStore.location={authority.ca}\nssl.trustStore.type=PEM\n"
        )

    def start(self) -> None:
        """Start it over its folder, and return when it answers, or at once in an ensemble."""
        with (self._folder / "server.log").open("a") as log:
            self.process = subprocess.Popen(
                [
                    *("java", "-Xmx128m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"),
                    *("-cp", f"{self._folder}:{JAR}:{_NETTY}"),
                    "org.apache.zookeeper.server.quorum.QuorumPeerMain",
                    str(self._folder / "zoo.cfg"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_until_serving(self) -> None:
        """Return when it serves clients."""
        eventually_sync(self._is_serving, 30, f"{self._folder}: ZooKeeper serves")

    def _is_serving(self) -> bool:
        assert self.process.poll() is None, (self._folder / "server.log").read_text()[-2000:]
        return bool(self.mode())

    def mode(self) -> str:
        """``standalone``, ``leader`` or ``follower``; "" while it serves no client."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
                connection.sendall(b"srvr")
                with connection.makefile("rb") as answer:
                    found = re.search(rb"Mode: (\w+)", answer.read())
        except OSError:
            return ""
        return found[1].decode() if found else ""

    def pause(self) -> None:
        """SIGSTOP."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class ZooKeeperEnsemble:
    """Three servers, of which two must be there.

    Owner: one test; inside ``with``.
    """

    def __init__(self, folder: Path) -> None:
        peers = "".join(
            f"server.{number}=127.0.0.1:{free_port()}:{free_port()}\n" for number in (1, 2, 3)
        )
        self._stack = contextlib.ExitStack()
        self.servers = [
            self._stack.enter_context(ZooKeeperServer(folder / str(number), number, peers))
            for number in (1, 2, 3)
        ]
        self.coordination = {"zookeeper": ",".join(server.hosts for server in self.servers)}

    def by_mode(self) -> list[ZooKeeperServer]:
        """The leader and the followers, once all that run have agreed."""

        def found() -> list[ZooKeeperServer]:
            running = [one for one in self.servers if one.process.poll() is None]
            modes = {one.hosts: one.mode() for one in running}
            if sorted(modes.values()) != ["follower"] * (len(running) - 1) + ["leader"]:
                return []
            return sorted(running, key=lambda one: modes[one.hosts] != "leader")

        return eventually_sync(found, 60, "the servers agree on a leader")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
