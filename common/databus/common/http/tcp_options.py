"""What a TCP connection is told once it is known how far its other end is."""

from __future__ import annotations

import socket
import struct

NEAR_US = 2000
_INFO_BYTES, _INFO_RTT = 104, 68


def is_near(connection: socket.socket) -> bool:
    """Whether an answer takes less than two milliseconds, by the kernel's own measure.

    False where the system does not tell, or the connection is none of TCP.
    """
    if connection.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return False
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    (round_trip_us,) = struct.unpack_from("I", info, _INFO_RTT)
    return bool(round_trip_us < NEAR_US)


def limit_sending(connection: socket.socket, size_bytes: int) -> None:
    """Keep no more than so much on the way to a peer that is near.

    What waits in the kernel's buffers by the megabyte has left the processor's cache when it is
    received: with less a pair of processes on one machine is twice as fast.  A distance, though,
    must be filled, so that a peer that is not near keeps what the kernel gives it.
    """
    if is_near(connection):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size_bytes)
