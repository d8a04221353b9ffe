"""Hosts of a test in network namespaces of their own, each of which can be cut off.

A host has an address on a bridge.  Servers of the test listen on the loopback interface of the
machine; ``forward`` gives one of them an address on the bridge.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
from typing import Self

import pytest

from tests.support.waiting import PATIENCE

_CONNECT_S = 5 * PATIENCE


class CutNetwork:
    """A bridge with hosts ``a``, ``b``, ....

    Owner: one test; inside ``with``.  Needs root and the ``ip`` command; skips without.
    """

    def __init__(self, names: str) -> None:
        self._subnet = f"10.231.{os.getpid() % 250 + 1}"
        self._bridge = f"dbt{os.getpid()}"
        self._names = names
        self._forwards: list[socket.socket] = []
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("network namespaces need root and the command ip")
        with contextlib.ExitStack() as held:
            try:
                _ip("link", "add", self._bridge, "type", "bridge")
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this machine gives no network namespaces: {error.stderr.strip()}")
            held.callback(_ip, "link", "del", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for number, name in enumerate(self._names, 2):
                self._add(held, name, number)
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._forwards:
            listener.close()
        self._held.close()

    def _add(self, held: contextlib.ExitStack, name: str, number: int) -> None:
        space = self.space(name)
        _ip("netns", "add", space)
        held.callback(_ip, "netns", "del", space)  # and its link with it
        link = ["link", "add", self._link(name), "type", "veth", "peer", "name", "eth0"]
        _ip(*link, "netns", space)
        _ip("link", "set", self._link(name), "master", self._bridge, "up")
        _ip("-n", space, "addr", "add", f"{self._subnet}.{number}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", space, "link", "set", device, "up")

    def _link(self, name: str) -> str:
        return f"{self._bridge}{name}"

    def space(self, name: str) -> str:
        """The namespace of a host."""
        return f"{self._bridge}-{name}"

    def address(self, name: str) -> str:
        """The address of a host."""
        return f"{self._subnet}.{self._names.index(name) + 2}"

    def inside(self, name: str) -> list[str]:
        """What comes before a command that runs on a host."""
        return ["ip", "netns", "exec", self.space(name)]

    def forward(self, port: int) -> str:
        """The host and port, on the bridge, of a server on the loopback interface."""
        host = f"{self._subnet}.{100 + len(self._forwards)}"
        _ip("addr", "add", f"{host}/24", "dev", self._bridge)
        listener = socket.create_server((host, 0))  # A server may listen everywhere at its port.
        self._forwards.append(listener)
        threading.Thread(target=_serve, args=(listener, port), daemon=True).start()
        return f"{host}:{listener.getsockname()[1]}"

    # -- faults --

    def cut(self, name: str) -> None:
        """No packet reaches the host or leaves it, and no connection ends by that."""
        _ip("link", "set", self._link(name), "down")

    def heal(self, name: str) -> None:
        """Undo ``cut``."""
        _ip("link", "set", self._link(name), "up")

    def cut_from(self, name: str, server: str) -> None:
        """No packet of the host reaches the server of a ``forward``; all others pass."""
        host = server.partition(":")[0]
        _ip("-n", self.space(name), "route", "add", "blackhole", f"{host}/32")

    def heal_from(self, name: str, server: str) -> None:
        """Undo ``cut_from``."""
        host = server.partition(":")[0]
        _ip("-n", self.space(name), "route", "del", "blackhole", f"{host}/32")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _serve(listener: socket.socket, port: int) -> None:
    with contextlib.suppress(OSError):
        while True:
            outer, _ = listener.accept()
            try:
                inner = socket.create_connection(("127.0.0.1", port), _CONNECT_S)
            except OSError:
                outer.close()
                continue
            inner.settimeout(None)
            for reader, writer in ((outer, inner), (inner, outer)):
                threading.Thread(target=_pump, args=(reader, writer), daemon=True).start()


def _pump(reader: socket.socket, writer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := reader.recv(1 << 16):
            writer.sendall(data)
    for one in (reader, writer):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
