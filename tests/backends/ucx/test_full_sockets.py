"""A connection ends although its socket takes no more data, as one to a host that is gone."""

import select
import socket

import pytest

from unicomm import _core


@pytest.fixture
def connected():
    """Pairs of connected TCP sockets: the sender's does not block."""
    opened = []

    def connect():
        with socket.create_server(("127.0.0.1", 0)) as server:
            sender = socket.create_connection(server.getsockname())
            receiver, _ = server.accept()
        sender.setblocking(False)
        opened.extend((sender, receiver))
        return sender, receiver

    yield connect
    for one in opened:
        one.close()


def fill(sender):
    """Returns how many bytes a socket takes before it is full."""
    sent = 0
    while True:
        try:
            sent += sender.send(bytes(1 << 16))
        except BlockingIOError:
            return sent


def test_only_full_sockets_are_ended_and_what_they_hold_arrives(connected):
    full, receiver = connected()
    free, other = connected()
    alone, _ = connected()  # of somebody else
    sent = fill(full)
    fill(alone)
    with select.epoll() as inner, select.epoll() as outer:
        inner.register(full, select.EPOLLIN)
        inner.register(free, select.EPOLLIN)
        outer.register(inner, select.EPOLLIN)
        assert _core.end_full_sockets(outer.fileno(), 0.0) == 1
    with pytest.raises(BrokenPipeError):
        full.send(b"x")
    with pytest.raises(BlockingIOError):
        alone.send(b"x")
    assert free.send(b"x") == 1
    assert other.recv(2) == b"x"
    arrived = 0
    while part := receiver.recv(1 << 20):
        arrived += len(part)
    assert arrived == sent


def test_a_socket_that_is_read_meanwhile_is_not_ended(connected):
    full, receiver = connected()
    left = fill(full)
    with select.epoll() as epoll:
        epoll.register(full, select.EPOLLIN)
        while left:
            left -= len(receiver.recv(left))
        assert _core.end_full_sockets(epoll.fileno(), 60.0) == 0
    assert full.send(b"x") == 1


def test_other_files_are_no_error():
    with socket.socket() as alone:
        assert _core.end_full_sockets(alone.fileno(), 0.0) == 0
    assert _core.end_full_sockets(-1, 0.0) == 0
