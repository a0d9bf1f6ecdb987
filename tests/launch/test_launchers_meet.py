"""The rendezvous of launchers: who gets at its store, and that nothing in it is unpickled."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from tests.ports import free_port
from unicomm.launch import job_token
from unicomm.launch.rendezvous import client, connections, handlers, source_filter, state
from unicomm.launch.rendezvous.client import LaunchersStore
from unicomm.launch.rendezvous.server import StoreServer

TOKEN, OTHER = "the token of this job", "the token of another job"
WITHIN = 60.0


@pytest.fixture
def serve() -> Iterator[Any]:
    """`serve(token)`: the port of a server on loopback."""
    servers = []

    def make(token: str) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        servers.append(StoreServer([listener], token))
        return int(port)

    yield make
    for server in servers:
        server.close()
        assert not server._thread.is_alive()


# --- the state ------------------------------------------------------------------------------------------


def some_state() -> _RendezvousState:
    made, now = _RendezvousState(), datetime.now(timezone.utc)
    nodes = [_NodeDesc(f"10.0.0.{i}", 100 + i, i) for i in range(4)]
    made.round, made.complete, made.deadline = 3, True, now + timedelta(seconds=30)
    made.participants = {nodes[0]: 0, nodes[1]: 1}
    made.wait_list, made.redundancy_list = {nodes[2]}, {nodes[3]}
    made.last_heartbeats = dict.fromkeys(nodes, now)
    return made


@pytest.mark.parametrize("made", [_RendezvousState(), some_state()], ids=["empty", "full"])
def test_a_state_survives_json(made):
    data = state.encode(made)
    assert vars(state.decode(data)) == vars(made)
    assert state.encode(state.decode(data)) == data


def test_hosts_that_wait_for_each_other_have_no_ranks_yet():
    """torch gives all participants rank 0 until the rendezvous is complete."""
    made = some_state()
    made.participants = dict.fromkeys(made.participants, 0)
    assert vars(state.decode(state.encode(made))) == vars(made)


def lies() -> dict[str, Any]:
    good = json.loads(state.encode(some_state()))
    return {
        "a version": good | {"version": 2},
        "no version": {k: v for k, v in good.items() if k != "version"},
        "a truth": good | {"closed": 1},
        "a round": good | {"round": -1},
        "a huge rank": good | {"participants": [["a", 1, 2, 10**400]]},
        "half a node": good | {"wait_list": [["a", 1]]},
        "a number for an address": good | {"wait_list": [[1, 1, 1]]},
        "a time without a zone": good | {"deadline": "2026-01-01T00:00:00"},
        "no time": good | {"last_heartbeats": [["a", 1, 2, 5]]},
        "a text for a list": good | {"participants": "abcd"},
        "a list": [],
        "a number": 5,
        "null": None,
    }


@pytest.mark.parametrize("lie", lies())
def test_a_state_that_nobody_wrote(lie):
    with pytest.raises(RendezvousStateError, match="UNICOMM_JOB_TOKEN"):
        state.decode(json.dumps(lies()[lie]).encode())


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_for_a_state(data):
    with pytest.raises(RendezvousStateError):
        state.decode(data)
    with pytest.raises(RendezvousStateError):
        state.decode(b"[" * 100_000 + data)


class Evil:
    """Its pickle makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def test_a_pickle_in_the_store_is_not_read(tmp_path):
    """By whatever way it came there: here by the store itself."""
    store, trap = HashStore(), tmp_path / "made by the pickle"
    backend = C10dRendezvousBackend(store, "job")
    backend.set_state(pickle.dumps(Evil(trap)))
    guarded = state.JsonState(backend)
    with pytest.raises(RendezvousStateError, match="not written by"):
        guarded.get_state()
    with pytest.raises(RendezvousStateError, match="not written by"):
        guarded.set_state(pickle.dumps(some_state()), None)
    assert not trap.exists()


def test_the_backend_holds_json():
    store = HashStore()
    backend = C10dRendezvousBackend(store, "job")
    guarded = state.JsonState(backend)
    assert guarded.name == "c10d"
    assert guarded.get_state() is None
    data, token, written = guarded.set_state(pickle.dumps(some_state()))
    assert written
    assert json.loads(backend.get_state()[0])["round"] == 3
    other = some_state()
    other.round = 9
    data, _, written = guarded.set_state(pickle.dumps(other), b"an older state")
    assert not written
    assert pickle.loads(data).round == 3
    assert guarded.set_state(pickle.dumps(other), token)[2]


def test_a_torch_whose_state_is_another_one(monkeypatch):
    class More(_RendezvousState):
        def __init__(self):
            super().__init__()
            self.colour = "blue"

    monkeypatch.setattr(state, "_RendezvousState", More)
    with pytest.raises(RendezvousStateError, match=r"another state of a rendezvous \(colour\)"):
        state.JsonState(C10dRendezvousBackend(HashStore(), "job"))


# --- the store of the launchers -----------------------------------------------------------------------


@pytest.mark.parametrize("token", [TOKEN, ""])
def test_the_store_of_launchers(serve, token):
    port = serve(token)
    both = [LaunchersStore("127.0.0.1", port, token, WITHIN) for _ in range(2)]
    one, two = (PrefixStore("p", each) for each in both)
    one.set("a", "1")
    assert two.get("a") == b"1"
    assert two.compare_set("a", "1", "2") == b"2"
    assert one.multi_get(["a", "a"]) == [b"2", b"2"]
    assert [one.add("n", 2), two.add("n", 3)] == [2, 5]
    long = bytes(range(256)) * 10_000
    one.set("long", long)
    assert two.get("long") == long
    assert not two.check(["b"])
    two.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(RuntimeError, match=r"wait timeout after 0\.3 s"):
        two.wait(["b"])
    setter = threading.Timer(0.2, one.set, ("b", "late"))
    setter.start()
    two.set_timeout(timedelta(seconds=WITHIN))
    assert two.get("b") == b"late"
    setter.join()


@pytest.mark.parametrize(
    ("host", "caller", "said"),
    [
        (TOKEN, OTHER, "the host has another token at .*, and this one has one, too"),
        (TOKEN, "", "the host has a token at .*, and this one has none"),
        ("", TOKEN, "the host has no token at .*, and this one has one, too"),
    ],
)
def test_tokens_that_differ_are_told_at_once(serve, host, caller, said):
    with pytest.raises(RendezvousConnectionError, match=f"(?s){said}.*set UNICOMM_JOB_TOKEN"):
        LaunchersStore("127.0.0.1", serve(host), caller, 1e6)


def test_a_caller_without_the_token_gets_no_answer(serve, capfd):
    """It plays the protocol by hand, up to a proof that it cannot give."""
    port = serve(TOKEN)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), WITHIN) as s:
            s.sendall(connections.HELLO.pack(connections.MAGIC, 1, bytes(32)))
            assert len(s.recv(connections.WELCOME, socket.MSG_WAITALL)) == connections.WELCOME
            s.sendall(bytes(connections.MAC))
            assert s.recv(1) == b""
    assert capfd.readouterr().err.count("has another token") == 1  # who calls again does not fill the log


def test_a_proof_cannot_be_used_again(serve):
    """What an eavesdropper has heard of one connection is worth nothing for another one."""
    port = serve(TOKEN)
    heard = []

    class Ear:
        def __init__(self, s: socket.socket) -> None:
            self._socket = s

        def __getattr__(self, name: str) -> Any:
            return getattr(self._socket, name)

        def sendall(self, data: bytes) -> None:
            heard.append(data)
            self._socket.sendall(data)

    with socket.create_connection(("127.0.0.1", port), WITHIN) as s:
        signed = connections.SignedSocket(Ear(s), TOKEN)  # type: ignore[arg-type]
        assert signed.seen_as == "127.0.0.1"
    with socket.create_connection(("127.0.0.1", port), WITHIN) as s:
        s.sendall(heard[0])
        s.recv(connections.WELCOME, socket.MSG_WAITALL)
        s.sendall(heard[1])
        assert s.recv(1) == b""


@pytest.mark.parametrize("change", ["byte", "repeat"])
def test_a_message_that_was_changed_ends_the_connection(serve, change):
    port = serve(TOKEN)
    store = LaunchersStore("127.0.0.1", port, TOKEN, WITHIN)
    store.set("key", "value")
    inner, sent = store._connection._socket, []

    class Middle:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def sendall(self, data: bytes) -> None:
            sent.append(data)
            again = sent[0] if change == "repeat" else bytes([*data[:-1], data[-1] ^ 1])
            inner.sendall(data if change == "repeat" and len(sent) == 1 else again)

    store._connection._socket = Middle()
    if change == "repeat":
        assert store.add("n", 1) == 1
    with pytest.raises(RuntimeError, match="ended the connection"):
        store.add("n", 1)
    # The next request makes a new connection. Nothing was done by what was changed or repeated.
    assert store.add("n", 10) == (11 if change == "repeat" else 10)


def test_an_interrupted_request_takes_no_answer_of_another(serve, monkeypatch):
    store = LaunchersStore("127.0.0.1", serve(TOKEN), TOKEN, WITHIN)
    store.set("a", "of a")
    store.set("b", "of b")

    class SignalCameError(Exception):
        pass

    def interrupted(*_: Any) -> Any:
        raise SignalCameError

    with monkeypatch.context() as patch:
        patch.setattr(connections, "_read", interrupted)
        with pytest.raises(SignalCameError):
            store.get("a")
    assert store.get("b") == b"of b"


def test_the_end_of_the_server_is_silent(capfd, caplog):
    """With callers that have proved that they know the token, and with one that has not yet."""
    listener = socket.create_server(("127.0.0.1", 0))
    port, server = listener.getsockname()[1], StoreServer([listener], TOKEN)
    stores = [LaunchersStore("127.0.0.1", port, TOKEN, WITHIN) for _ in range(2)]
    for store in stores:
        store.set("key", "value")
    with socket.create_connection(("127.0.0.1", port), WITHIN) as stranger:
        server.close()
        with contextlib.suppress(ConnectionError):  # it was in the queue of the socket
            assert stranger.recv(1) == b""
    with pytest.raises(RuntimeError):
        stores[0].get("key")
    assert capfd.readouterr().err == ""
    assert not caplog.records


def test_the_server_waits_a_while_for_its_callers_to_leave():
    listener = socket.create_server(("127.0.0.1", 0))
    port, server = listener.getsockname()[1], StoreServer([listener], TOKEN)
    store = LaunchersStore("127.0.0.1", port, TOKEN, WITHIN)
    store.set("here", "1")  # it counts as a caller as soon as it is answered, not when it has connected
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(server.close, WITHIN)
        store.set("key", "value")  # as a launcher that still has to read that all are done
        assert not closing.done()
        store.close()
        closing.result(WITHIN)
    with pytest.raises(RuntimeError):
        store.get("key")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="which hosted the rendezvous, has ended"):
        store.get("key")  # nobody listens there: nothing to wait for
    assert time.monotonic() - began < client._GREETING


GARBAGE = [
    b"",
    b"\0",
    bytes(41),
    b"GET / HTTP/1.1\r\n\r\n",
    b"unicomm1" + b"\xff" * 1000,
    os.urandom(1 << 16),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_does_not_hold_up_the_job(serve, garbage):
    port = serve(TOKEN)
    strangers = [socket.create_connection(("127.0.0.1", port), WITHIN) for _ in range(300)]
    try:
        for stranger in strangers:
            with contextlib.suppress(OSError):  # it was disconnected
                stranger.sendall(garbage)
        store = LaunchersStore("127.0.0.1", port, TOKEN, WITHIN)
        store.set("key", "value")
        assert store.get("key") == b"value"
    finally:
        for stranger in strangers:
            stranger.close()


def test_silent_strangers_are_disconnected(serve, monkeypatch):
    from unicomm.launch.rendezvous import server

    monkeypatch.setattr(server, "_PATIENCE", 0.2)
    with socket.create_connection(("127.0.0.1", serve(TOKEN)), WITHIN) as silent:
        assert silent.recv(1) == b""


def test_what_is_no_launcher():
    other = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RendezvousConnectionError, match=r"no launcher of `unicomm run`.*none with torchrun"):
        LaunchersStore("127.0.0.1", other.port, TOKEN, 0.5)
    with socket.create_server(("127.0.0.1", 0)) as chatty:
        port = chatty.getsockname()[1]
        talker = threading.Thread(target=lambda: chatty.accept()[0].sendall(b"SSH-2.0-OpenSSH_9.2\r\n"))
        talker.start()
        with pytest.raises(RendezvousConnectionError, match="no launcher of `unicomm run`"):
            LaunchersStore("127.0.0.1", port, TOKEN, 1e6)
        talker.join(WITHIN)


def test_every_wait_for_the_host_ends(monkeypatch):
    """Nobody listens; somebody listens and says nothing."""
    with pytest.raises(RendezvousConnectionError, match=r"not reached at 127.0.0.1, port \d+ within 0.3 s"):
        LaunchersStore("127.0.0.1", free_port(), TOKEN, 0.3)
    monkeypatch.setattr(client, "_GREETING", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        began = time.monotonic()
        with pytest.raises(RendezvousConnectionError, match="no launcher of"):
            LaunchersStore("127.0.0.1", mute.getsockname()[1], TOKEN, 0.5)
        assert time.monotonic() - began < WITHIN


def test_a_host_that_comes_late(serve):
    port = free_port()
    made = []

    def come() -> None:
        made.append(StoreServer([socket.create_server(("127.0.0.1", port))], TOKEN))

    late = threading.Timer(0.5, come)
    late.start()
    LaunchersStore("127.0.0.1", port, TOKEN, WITHIN).set("key", "value")
    late.join()
    made[0].close()


# --- where launchers listen ---------------------------------------------------------------------------


def rendezvous(**more: Any) -> Any:
    settings: dict[str, Any] = {"backend": "c10d", "endpoint": "localhost:0", "run_id": "job"}
    settings |= {"min_nodes": 1, "max_nodes": 1, "local_addr": "127.0.0.1"}
    return handlers.handler(RendezvousParameters(**(settings | more)), TOKEN)


def listening() -> set[tuple[str, int]]:
    import psutil

    connections = psutil.Process().net_connections("tcp")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


def test_one_host_meets_in_memory():
    before = listening()
    made = rendezvous()
    assert listening() == before
    info = made.next_rendezvous()
    [(address, port)] = listening() - before
    assert address == "127.0.0.1"
    assert (info.rank, info.world_size) == (0, 1)
    assert (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) == (address, port)
    TCPStore(address, port, is_master=False).set("key", "value")
    assert made.next_rendezvous().bootstrap_store_info.master_port == port  # a restart
    assert made.shutdown()


@pytest.mark.parametrize("choice", ["", "all"])
def test_the_static_rendezvous_of_one_host(choice, monkeypatch):
    monkeypatch.setenv("UNICOMM_STORE_LISTEN", choice)
    before, port = listening(), free_port("0.0.0.0")
    made = rendezvous(backend="static", endpoint=f"127.0.0.1:{port}", rank=0)
    info = made.next_rendezvous()
    assert listening() - before == {("::" if choice else "127.0.0.1", port)}
    info.store.set("key", "value")
    assert made.get_backend() == "static"


def test_two_launchers_of_one_host_share_a_rendezvous():
    """The second finds the port taken, and calls the first one."""
    port, infos = free_port(), {}
    both = {"endpoint": f"localhost:{port}", "min_nodes": 2, "max_nodes": 2, "last_call_timeout": "1"}
    before = listening()
    launchers = [rendezvous(**both) for _ in range(2)]
    assert [each._server is not None for each in launchers] == [True, False]
    assert listening() - before == {("127.0.0.1", port)}
    meeting = [
        threading.Thread(target=lambda i=i, each=each: infos.update({i: each.next_rendezvous()}))
        for i, each in enumerate(launchers)
    ]
    for one in meeting:
        one.start()
    for one in meeting:
        one.join(WITHIN)
    assert sorted(info.rank for info in infos.values()) == [0, 1]
    assert len({info.bootstrap_store_info.master_port for info in infos.values()}) == 1
    with pytest.raises(RendezvousConnectionError, match="cannot listen at localhost"):
        rendezvous(**both, is_host="true")
    for each in reversed(launchers):
        each.shutdown()


@pytest.mark.parametrize(
    ("endpoint", "own", "at"),
    [
        ("localhost", "10.1.2.3", {"127.0.0.1"}),
        ("127.0.0.1", "OWN", {"127.0.0.1"}),
        ("OWN", "OWN", {"OWN"}),
        ("node17", "OWN", {"127.0.1.1", "OWN"}),  # the host's own name, as Debian has it
        ("198.51.100.1", "OWN", {"OWN"}),  # behind a NAT
        ("198.51.100.1", "198.51.100.1", {"::"}),
    ],
)
def test_where_the_rendezvous_of_several_hosts_listens(endpoint, own, at, monkeypatch):
    mine = next((a for a in source_filter.own_addresses() if "." in a and not a.startswith("127.")), None)
    if mine is None:
        pytest.skip("this host has no network but loopback")
    resolve = socket.getaddrinfo
    names = {"node17": "127.0.1.1", "OWN": mine}
    monkeypatch.setattr(socket, "getaddrinfo", lambda h, *a, **k: resolve(names.get(h, h), *a, **k))
    made = handlers._listeners(endpoint.replace("OWN", mine), 0, own.replace("OWN", mine))
    try:
        assert {s.getsockname()[0] for s in made} == {a.replace("OWN", mine) for a in at}
    finally:
        for s in made:
            s.close()


# --- the filter ---------------------------------------------------------------------------------------


def reaches(listener: socket.socket, source: str) -> bool:
    family = socket.AF_INET6 if ":" in source else socket.AF_INET
    with socket.socket(family) as caller:
        caller.bind((source, 0))
        caller.settimeout(1.0)
        try:
            caller.connect(("::1" if ":" in source else "127.0.0.1", listener.getsockname()[1]))
        except TimeoutError:
            return False
        return True


def test_only_the_hosts_of_the_job_reach_a_filtered_socket():
    dual = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
    with socket.create_server(("", 0), **dual) as listener:
        assert reaches(listener, "127.0.0.1")
        if not source_filter.allow_only(listener, ["127.0.0.2", "2001:db8::1", "fe80::1%eth0"]):
            pytest.skip("this kernel has no filters of sockets")
        assert reaches(listener, "127.0.0.2")
        assert not reaches(listener, "127.0.0.1")
        if dual:
            assert not reaches(listener, "::1")
            assert source_filter.allow_only(listener, ["2001:db8::1", "::1", "::2", "127.0.0.1"])
            assert reaches(listener, "::1")
            assert not reaches(listener, "127.0.0.2")
        many = [f"10.{i >> 8}.{i & 255}.1" for i in range(1000)]
        assert source_filter.allow_only(listener, [*many, "127.0.0.3"])
        assert reaches(listener, "127.0.0.3")


def test_too_many_hosts_for_a_filter_leave_the_socket_open():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert source_filter.allow_only(listener, ["127.0.0.2"])
        many = [f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}" for i in range(2046)]
        assert not source_filter.allow_only(listener, many)
        assert reaches(listener, "127.0.0.1")
        assert source_filter.allow_only(listener, many[:-1])  # 4096 instructions
        assert not reaches(listener, "127.0.0.1")


@pytest.mark.parametrize("said", [b"", b"5", b"{", b'["x", 7, null, "10.0.0.1", "::1%lo"]', b"[" * 100_000])
def test_addresses_that_a_host_says_of_itself(said):
    assert handlers._addresses(said) <= {"10.0.0.1", "::1"}


# --- tokens -------------------------------------------------------------------------------------------


def test_a_token_in_a_file(tmp_path, monkeypatch):
    file = tmp_path / "token"
    with pytest.raises(job_token.TokenError, match="umask 077; openssl rand"):
        job_token.token_of_file(file)
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o644)
    with pytest.raises(job_token.TokenError, match="chmod 600"):
        job_token.token_of_file(file)
    file.chmod(0o600)
    assert job_token.token_of_file(file) == TOKEN
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    if file.stat().st_uid:
        with pytest.raises(job_token.TokenError, match="not private"):
            job_token.token_of_file(file)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 30, "ü".encode() * 30])
def test_a_file_without_a_secret(tmp_path, content):
    file = tmp_path / "token"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(job_token.TokenError, match="openssl rand"):
        job_token.token_of_file(file)


def test_a_file_that_is_none(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(job_token.TokenError, match="not a regular file"):
        job_token.token_of_file(tmp_path / "pipe")
    with pytest.raises(job_token.TokenError):
        job_token.token_of_file(tmp_path)
