"""A listening socket, without the server: code that only binds one imports no server."""

from __future__ import annotations

import socket

from databus.common.errors import ServerUnavailable


def host_of(address: str) -> str:
    """The host in HOST:PORT, an IPv6 address without its brackets."""
    return address.rpartition(":")[0].strip("[]")


def listening_socket(address: str, *, reuse_port: bool = False) -> socket.socket:
    """A socket that listens at HOST:PORT; port 0 chooses a free one.

    Raises:
        ServerUnavailable: the address is taken or not ours.
    """
    host, port = host_of(address), address.rpartition(":")[2]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, int(port)))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ServerUnavailable(
            f"cannot listen at {address}: {error.strerror or error}; stop what listens there "
            f"or configure another port"
        ) from error
    return listener
