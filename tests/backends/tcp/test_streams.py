"""TCP streams over pairs of connected sockets: each message comes whole, in order, to who asked for it."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from itertools import combinations

import pytest
import torch

from unicomm import _core

WITHIN = 30.0  # seconds that a wait may take
SPIN = 0.0001
MARK = b"uc1"


def connected() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection whose buffers are small, so that messages come in parts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        caller = socket.socket()
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
        caller.connect(server.getsockname())
        return caller, server.accept()[0]


@pytest.fixture
def ranks():
    """`ranks(n)`: that many connected transports."""
    made = []

    def connect(size: int) -> list[_core.TcpStreams]:
        ends: list[list[int]] = [[-1] * size for _ in range(size)]
        for a, b in combinations(range(size), 2):
            caller, called = connected()
            ends[a][b], ends[b][a] = caller.detach(), called.detach()
        for rank in range(size):
            made.append(_core.TcpStreams(rank, size, SPIN))
            made[-1].connect(ends[rank])
        return made[-size:]

    yield connect
    for one in made:
        one.stop()
        assert one.drop()


@pytest.fixture
def stranger():
    """A transport of rank 0 of two, and the plain socket of the other one."""
    ours, theirs = connected()
    streams = _core.TcpStreams(0, 2, SPIN)
    streams.connect([-1, ours.detach()])
    yield streams, theirs
    streams.stop()
    streams.drop()
    theirs.close()


def pattern(number: int, count: int) -> torch.Tensor:
    return (torch.arange(count) * 7 + number * 131).to(torch.uint8)


def received(
    streams: _core.TcpStreams, peer: int, out: torch.Tensor, tag: int = 0, within: float = WITHIN
) -> list[tuple[int, int, int]] | None:
    """Receives one message: (its number, the sender, its bytes)."""
    messages = _core.TransportMessages(streams)
    messages.add(7, False, peer, out.data_ptr(), out.nbytes, tag)
    return messages.wait(within, True)


def send(streams: _core.TcpStreams, peer: int, data: torch.Tensor, tag: int = 0) -> _core.TransportMessages:
    """Begins to send `data`, which the caller keeps until the message is over."""
    messages = _core.TransportMessages(streams)
    messages.add(0, True, peer, data.data_ptr(), data.nbytes, tag)
    return messages


def head(count: int, tag: int = 0, kind: int = 0, mark: bytes = MARK) -> bytes:
    return count.to_bytes(8, "little") + tag.to_bytes(4, "little") + bytes([kind]) + mark


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("seed", range(4))
def test_random_messages(ranks, size, seed):
    """Every rank sends to every other one, with few tags and many sizes, and receives in another order."""
    comms = ranks(size)
    choose = random.Random(f"{size} {seed}")
    plan: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for a in range(size):
        for b in range(size):
            if a != b:
                plan[a, b] = [
                    (
                        number,
                        choose.randrange(3),
                        choose.choice([0, 1, 40, 4079, 4080, 4081, 60_000, 700_000]),
                    )
                    for number in range(choose.randrange(3, 9))
                ]
    failures = []

    def run(me: int) -> None:
        order = random.Random(f"{seed} {me}")
        messages = _core.TransportMessages(comms[me])
        kept, expected, starts = [], [], []
        for (a, b), entries in plan.items():
            if me not in (a, b):
                continue
            starts.append(
                [(a == me, b if a == me else a, a * 100 + number, tag, n) for number, tag, n in entries]
            )
        key = 0
        while starts:
            queue = order.choice(starts)
            sends, peer, number, tag, count = queue.pop(0)
            if not queue:
                starts.remove(queue)
            data = pattern(number, count) if sends else torch.full((count,), 99, dtype=torch.uint8)
            kept.append(data)
            if not sends:
                expected.append((data, pattern(number, count)))
            messages.add(key, sends, peer, data.data_ptr(), count, tag)
            key += 1
            if order.random() < 0.2:
                messages.wait(0.001, False)
        if messages.wait(WITHIN, True) is None:
            failures.append(f"rank {me} waits")
        failures.extend(f"rank {me}: wrong data" for got, want in expected if not torch.equal(got, want))

    threads = [threading.Thread(target=run, args=(me,)) for me in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("count", [3, 5_000, 3_000_000])
def test_a_message_that_comes_before_its_receive(ranks, count):
    """Whole, or in part while its receive begins; another one behind it is received first."""
    first, second = ranks(2)
    data, small = pattern(1, count), pattern(2, 11)
    sender = threading.Thread(
        target=lambda: [
            send(first, 1, data, 5).wait(WITHIN, True),
            send(first, 1, small, 6).wait(WITHIN, True),
        ]
    )
    sender.start()
    early, late = torch.zeros_like(data), torch.zeros_like(small)
    if count < 1_000_000:
        assert received(second, 0, late, 6) == [(7, 0, 11)]
        assert received(second, 0, early, 5) == [(7, 0, count)]
    else:
        nothing = torch.zeros(1, dtype=torch.uint8)
        assert received(second, 0, nothing, 9, 0.05) is None  # reads a part of it
        assert received(second, 0, early, 5) == [(7, 0, count)]
        assert received(second, 0, late, 6) == [(7, 0, 11)]
    sender.join()
    assert torch.equal(early, data)
    assert torch.equal(late, small)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("count", [100, 300_000])
def test_memory_that_is_too_small_stays_as_it_is(ranks, count, early):
    first, second = ranks(2)
    data, out = pattern(3, count), torch.zeros(count // 2, dtype=torch.uint8)

    def run() -> None:
        send(first, 1, data, 1).wait(WITHIN, True)
        send(first, 1, data, 2).wait(WITHIN, True)

    sender = threading.Thread(target=run)
    sender.start()
    whole = torch.zeros(count, dtype=torch.uint8)
    if early:
        assert received(second, 0, whole, 2) == [(7, 0, count)]
        assert torch.equal(whole, data)
    assert received(second, 0, out, 1) == [(7, 0, count)]
    assert not out.any()
    if not early:
        assert received(second, 0, whole, 2) == [(7, 0, count)]  # what follows is not disturbed
        assert torch.equal(whole, data)
    sender.join()


def test_a_receive_from_any_rank_takes_the_first_that_came(ranks):
    first, second, third = ranks(3)
    out = torch.zeros(4, dtype=torch.uint8)
    nothing = torch.zeros(1, dtype=torch.uint8)
    for sender, rank in ((third, 2), (second, 1)):
        data = pattern(rank, 4)
        send(sender, 0, data).wait(WITHIN, True)
        assert received(first, rank, nothing, 9, 0.05) is None  # reads it
    for rank in (2, 1):
        assert received(first, -1, out) == [(7, rank, 4)]
        assert torch.equal(out, pattern(rank, 4))


def test_the_older_receive_takes_a_message(ranks):
    """Of one from that rank and one from any."""
    first, second = ranks(2)
    outs = [torch.zeros(1, dtype=torch.uint8) for _ in range(4)]
    messages = _core.TransportMessages(second)
    for number, (peer, out) in enumerate(zip((-1, 0, 0, -1), outs, strict=True)):
        messages.add(number, False, peer, out.data_ptr(), 1, 0)
    for number in range(4):
        send(first, 1, torch.tensor([number + 1], dtype=torch.uint8)).wait(WITHIN, True)
    assert sorted(messages.wait(WITHIN, True)) == [(number, 0, 1) for number in range(4)]
    assert [int(out) for out in outs] == [1, 2, 3, 4]


def test_what_was_sent_before_an_end_is_received(ranks):
    """Then who waits for more from that rank hears of the end, and who waits for another one does not."""
    first, second, third = ranks(3)
    data, out = pattern(4, 9_000), torch.zeros(9_000, dtype=torch.uint8)
    send(second, 0, data).wait(WITHIN, True)
    assert second.flush(WITHIN)
    assert second.drop()
    assert received(first, 1, out) == [(7, 1, 9_000)]
    assert torch.equal(out, data)
    with pytest.raises(_core.TransportFailure, match=r"^rank 1: "):
        received(first, 1, out)
    send(third, 0, data).wait(WITHIN, True)
    assert received(first, 2, out) == [(7, 2, 9_000)]
    with pytest.raises(_core.TransportFailure, match=r"^rank 1: "):
        send(first, 1, data)


def test_the_rank_that_is_waited_for_is_named(ranks):
    """Also if another rank has left before, from which nothing was expected."""
    first, second, third = ranks(3)
    out = torch.zeros(1, dtype=torch.uint8)
    assert second.drop()
    assert received(first, 2, out, 1, 0.1) is None  # notes the end
    assert third.drop()
    with pytest.raises(_core.TransportFailure, match=r"^rank 2: "):
        received(first, 2, out)


def test_an_end_in_the_middle_of_a_message(stranger):
    streams, theirs = stranger
    theirs.sendall(head(1000) + bytes(10))
    theirs.close()
    with pytest.raises(_core.TransportFailure, match=r"^rank 1: the connection has ended"):
        received(streams, 1, torch.zeros(1000, dtype=torch.uint8))


def test_something_that_is_no_message(stranger):
    streams, theirs = stranger
    theirs.sendall(head(4, mark=b"GET") + b"1234")
    with pytest.raises(_core.TransportFailure, match="rank 1: it sent something that is no message"):
        received(streams, 1, torch.zeros(4, dtype=torch.uint8))


def test_a_message_for_which_there_is_no_memory(stranger):
    streams, theirs = stranger
    theirs.sendall(head(1 << 62, tag=3))
    for _ in range(2):
        with pytest.raises(_core.TransportFailure, match=f"no memory for a message of {1 << 62} bytes"):
            received(streams, 1, torch.zeros(4, dtype=torch.uint8))


def test_heads_in_pieces(stranger):
    streams, theirs = stranger
    theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    out = torch.zeros(5, dtype=torch.uint8)
    text = head(5) + b"\1\2\3\4\5" + head(0, tag=1) + head(5, tag=2) + b"\5\4\3\2\1"

    def trickle() -> None:
        for byte in text:
            theirs.sendall(bytes([byte]))

    sender = threading.Thread(target=trickle)
    sender.start()
    assert received(streams, 1, out) == [(7, 1, 5)]
    assert out.tolist() == [1, 2, 3, 4, 5]
    assert received(streams, 1, out[:0], 1) == [(7, 1, 0)]
    assert received(streams, 1, out, 2) == [(7, 1, 5)]
    assert out.tolist() == [5, 4, 3, 2, 1]
    sender.join()


def test_a_send_is_over_when_the_system_has_it(stranger):
    """And not before: nobody reads meanwhile."""
    streams, theirs = stranger
    data = pattern(5, 8 << 20)
    sending = send(streams, 1, data)
    assert sending.wait(0.05, False) == []
    assert not streams.flush(0.05)
    got = bytearray()
    reader = threading.Thread(
        target=lambda: [got.extend(part) for part in iter(lambda: theirs.recv(1 << 16), b"")]
    )
    reader.start()
    assert sending.wait(WITHIN, True) == [(0, 1, 0)]
    assert streams.flush(WITHIN)
    streams.drop()
    reader.join()
    assert bytes(got) == head(8 << 20) + bytes(data.numpy())


def test_a_wait_ends_by_stop_and_by_rouse(ranks):
    first, _ = ranks(2)
    out = torch.zeros(1, dtype=torch.uint8)
    messages = _core.TransportMessages(first)
    messages.add(0, False, 1, out.data_ptr(), 1, 0)
    threading.Timer(0.1, first.rouse).start()
    assert messages.wait(WITHIN, False) == []
    threading.Timer(0.1, first.stop).start()
    assert messages.wait(WITHIN, False) is None
    assert first.drop()
    with pytest.raises(RuntimeError, match="has ended"):
        messages.add(1, False, 1, out.data_ptr(), 1, 0)


@pytest.mark.parametrize("by", ["deadline", "rouse", "stop"])
def test_a_wait_ends_although_data_keep_coming(stranger, by):
    """Messages that nobody receives, faster than they are read: a look at the connection finds some."""
    streams, theirs = stranger
    out, dry = torch.zeros(1, dtype=torch.uint8), threading.Event()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    messages = _core.TransportMessages(streams)
    messages.add(0, False, 1, out.data_ptr(), 1, 5)

    def feed() -> None:
        flood = head(0) * (1 << 12)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the test is over
            for _ in range(4000):
                theirs.sendall(flood)
            dry.set()

    feeding = threading.Thread(target=feed)
    feeding.start()
    if by != "deadline":
        threading.Timer(0.2, getattr(streams, by)).start()
    ended = messages.wait(0.2 if by == "deadline" else WITHIN, False)
    assert not dry.is_set()
    assert ended == (None if by == "stop" else [])
    theirs.shutdown(socket.SHUT_RDWR)
    feeding.join(WITHIN)


def test_descriptors_are_closed(ranks):
    with socket.socket() as lowest:
        before = lowest.fileno()
    pair = ranks(2)
    for one in pair:
        one.stop()
        assert one.drop()
    with socket.socket() as lowest:
        assert lowest.fileno() == before


def test_what_a_rank_had_sent_arrives_although_it_gives_up(ranks):
    """Also if it has not read everything: the system would throw away what it has not sent yet."""
    first, second = ranks(2)
    data, told = pattern(2, 3_000), 0
    while send(first, 1, data).wait(0.0, False):
        told += 1
    assert told > 1
    send(second, 0, data).wait(WITHIN, True)
    first.stop()
    assert first.drop()
    out = torch.zeros_like(data)
    for _ in range(told):
        assert received(second, 0, out.zero_()) == [(7, 0, 3_000)]
        assert torch.equal(out, data)


def test_a_connection_that_cannot_be_watched(tmp_path):
    """Those after it are closed as well, though their reads would wait."""
    streams = _core.TcpStreams(0, 3, SPIN)
    ours, theirs = connected()
    with open(tmp_path / "file", "w") as file, theirs:  # epoll refuses files
        with pytest.raises(OSError, match="cannot be watched"):
            streams.connect([-1, os.dup(file.fileno()), ours.detach()])
        theirs.settimeout(WITHIN)
        assert theirs.recv(1) == b""
