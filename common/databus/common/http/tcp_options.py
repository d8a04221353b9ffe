"""Options of a TCP connection that depend on how far its peer is."""

from __future__ import annotations

import socket
import struct

NEAR_US = 2000
_INFO_BYTES, _INFO_RTT = 104, 68


def is_near(connection: socket.socket) -> bool:
    """Whether an answer takes less than two milliseconds, by the kernel's own measure.

    False if the system does not report it, or the connection is not TCP.
    """
    if connection.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return False
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    (round_trip_us,) = struct.unpack_from("I", info, _INFO_RTT)
    return bool(round_trip_us < NEAR_US)


def limit_sending(connection: socket.socket, size_bytes: int) -> None:
    """Limit the kernel's send buffer for a peer that is near.

    Megabytes in the kernel's buffers have left the processor's cache before the peer receives
    them: with less, two processes on one machine are twice as fast.  A distant peer needs the
    buffer to fill the connection, so its size is left to the kernel.
    """
    if is_near(connection):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size_bytes)
