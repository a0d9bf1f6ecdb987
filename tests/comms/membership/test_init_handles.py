"""What ranks that reconfigure say to each other: handles, requests, the store of an attempt."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comms import inside
from unicomm import InvalidArgumentError
from unicomm.comms.membership.handles import Handle
from unicomm.comms.membership.remote_store import RemoteStore, answer, frame, take_frame

patiently = settings(deadline=None, max_examples=50)


@patiently
@given(st.one_of(st.text(), st.binary().map(lambda b: "unicomm:" + base64.urlsafe_b64encode(b).decode())))
def test_any_text_as_a_handle(text):
    with pytest.raises(InvalidArgumentError):
        Handle.read(text)


@patiently
@given(
    st.dictionaries(
        st.sampled_from(["id", "of", "key", "net", "at"]),
        st.recursive(st.one_of(st.text(), st.integers(), st.none()), st.lists, max_leaves=5),
    )
)
def test_any_fields_as_a_handle(fields):
    text = "unicomm:" + base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()
    with pytest.raises(InvalidArgumentError):
        Handle.read(text)


@patiently
@given(st.binary())
def test_any_bytes_as_a_request(said):
    """The store of an attempt takes what it can read, and raises nothing but `ValueError`."""
    store = dist.HashStore()
    buffer = bytearray(said)
    for _ in range(len(said) + 1):
        before = len(buffer)
        try:
            found = take_frame(buffer)
            if found is None:
                break
            answer(store, *found)
        except ValueError:
            break
        assert len(buffer) < before


@patiently
@given(st.integers(0, 255), st.lists(st.binary(), max_size=4))
def test_any_request(operation, fields):
    buffer = bytearray(frame(operation, fields))
    found = take_frame(buffer)
    assert found == (operation, fields)
    assert not buffer
    with contextlib.suppress(ValueError, RuntimeError):  # no such request, or not for this key
        assert take_frame(bytearray(answer(dist.HashStore(), operation, fields)))[0] == operation


def test_the_store_of_an_attempt(cast):
    """What the others have is the first rank's, also when an answer does not fit into a socket's buffer."""
    ranks = cast("shm", 2)
    ranks.become([0, 1])
    near, far = (inside.store(comm) for comm in ranks.comms)
    assert type(far) is RemoteStore
    big = bytes(range(256)) * 4096 * 16
    near.set("a", big)
    assert far.get("a") == big
    far.set("b", big)
    assert near.get("b") == big
    assert far.compare_set("c", "", "1") == b"1"
    assert near.compare_set("c", "1", "2") == b"2"
    assert (far.add("n", 3), near.add("n", 4), far.check(["a", "n"]), far.check(["a", "z"])) == (
        3,
        7,
        True,
        False,
    )
    far.append("c", "3")
    far.multi_set(["d", "e"], ["4", "5"])
    assert far.multi_get(["c", "d", "e"]) == [b"23", b"4", b"5"]
    assert (far.delete_key("c"), near.check(["c"]), far.delete_key("c")) == (True, False, False)
    with pytest.raises(RuntimeError, match="wait timeout"):
        far.wait(["z"], timedelta(seconds=0.01))
    ranks.become([1, 0])
    with pytest.raises(RuntimeError, match="the first rank's store"):
        far.check(["a"])


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


def test_a_late_answer_is_not_that_to_the_next_request():
    """After a timeout the connection is of no use: what comes on it answers the request before."""
    near, far = tcp_pair()
    store = RemoteStore(near, 5.0)
    near.settimeout(0.05)
    with pytest.raises(RuntimeError, match="timed out"):
        store.check(["a"])
    with contextlib.suppress(OSError):
        far.sendall(answer(dist.HashStore(), 3, [b"a"]))  # the answer, for "no"
    with pytest.raises(RuntimeError, match="timed out"):
        store.check(["b"])
    far.close()


def test_no_answer_is_taken_after_an_interrupt(monkeypatch):
    near, far = tcp_pair()
    store = RemoteStore(near, 5.0)

    class Interrupted:
        sendall = near.sendall

        @staticmethod
        def recv(_: int) -> bytes:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "_socket", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            store.check(["a"])
    far.sendall(answer(dist.HashStore(), 3, [b"a"]))
    with pytest.raises(RuntimeError, match="interrupted"):
        store.check(["b"])
    far.close()


def test_a_handle_is_read_as_it_was_written(cast):
    text = cast("gloo", 1).handles[0]
    assert Handle.read(text).text == text
    assert text.isascii()
    assert len(text.split()) == 1
