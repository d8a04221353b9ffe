"""Options of a TCP connection: the send buffer for a peer that is near."""

from __future__ import annotations

import socket

import pytest

from databus.common.http import tcp_options


def test_a_neighbour_has_less_on_the_way_and_still_gets_every_byte() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as there:
        here, _ = listener.accept()
        with here:
            assert tcp_options.is_near(here)
            tcp_options.limit_sending(here, 64 << 10)
            # Linux doubles the value.
            assert here.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 128 << 10
            here.sendall(b"a row")
            assert there.recv(5) == b"a row"


def test_a_remote_reader_has_the_kernels_default_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_options, "NEAR_US", 0)
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as there:
        before = there.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        tcp_options.limit_sending(there, 64 << 10)
        assert there.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before


def test_what_is_no_tcp_is_left_alone() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert not tcp_options.is_near(one)
        tcp_options.limit_sending(one, 64 << 10)
