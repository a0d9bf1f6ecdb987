"""new_comm: over every store, again and again, and what it refuses."""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

import unicomm
from tests.comms.calls import check_sum
from tests.threads import results
from unicomm import (
    BackendError,
    CommTimeoutError,
    Communicator,
    InvalidArgumentError,
    MismatchError,
    PeerLostError,
    UnsupportedError,
)
from unicomm.backends import registry
from unicomm.backends.fake import FakeBackend
from unicomm.backends.registry import find_backend
from unicomm.backends.shm import ShmBackend
from unicomm.comms.backend import PROTOCOL_VERSION
from unicomm.testing import run_ranks

CPU = torch.device("cpu")
N = 3


def on_ranks(f: Callable[[int], Any], n: int = N) -> list[Any]:
    """`f(rank)` in one thread per rank."""
    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(f, range(n), timeout=60))


def stores(kind: str, path: Any) -> list[Store]:
    """One store object for each rank, all on the same data."""
    if kind.startswith("prefix of "):
        return [PrefixStore("some/prefix", store) for store in stores(kind.removeprefix("prefix of "), path)]
    if kind == "hash":
        return [HashStore()] * N
    if kind == "file":
        return [FileStore(str(path / "store"), N) for _ in range(N)]
    first = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return [first, *(TCPStore("127.0.0.1", first.port, None, False) for _ in range(N - 1))]


@pytest.mark.parametrize(
    "kind", ["hash", "file", "tcp", "prefix of hash", "prefix of tcp", "prefix of prefix of file"]
)
def test_again_and_again(kind, tmp_path):
    """20 communicators of one name, one after the other and two at a time, over one store."""
    given = stores(kind, tmp_path)

    def rank(r: int) -> list[str]:
        uids = []
        before = None
        for i in range(20):
            comm = unicomm.new_comm("shm", CPU, name="same", store=given[r], rank=r, size=N, timeout=60)
            check_sum(comm)
            uids.append(comm.get_uid())
            if i % 2 and before is not None:
                check_sum(before)
                before.finalize()
                comm.finalize()
            before = None if i % 2 else comm
        return uids

    first, *others = on_ranks(rank)
    assert all(uids == first for uids in others)
    assert len(set(first)) == 20


@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp"])
def test_both_kinds_over_one_tcp_store(backend, tmp_path):
    given = stores("tcp", tmp_path)

    def rank(r: int) -> None:
        with unicomm.new_comm(backend, "cpu", store=given[r], rank=r, size=N, timeout=60) as comm:
            child = comm.split([2, 1, 0])
            check_sum(comm)
            check_sum(child)
            child.finalize()

    on_ranks(rank)


def test_one_rank_needs_no_store():
    for backend in ("shm", "gloo", "fake"):
        with unicomm.new_comm(backend, "cpu") as comm:
            assert (comm.get_rank(), comm.get_size(), comm.get_name()) == (0, 1, "main")
            check_sum(comm)


def test_the_block_finalizes(raised):
    with unicomm.new_comm("shm", CPU) as comm:
        work = comm.barrier(True)
    assert work.is_completed()
    assert "finalized" in str(raised(comm.barrier, False))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "backend": ({"backend": "shn"}, InvalidArgumentError, "there is no backend 'shn'"),
    "device": ({"device": None}, InvalidArgumentError, "needs a device"),
    "device text": ({"device": "cqu"}, InvalidArgumentError, "device='cqu' is no device"),
    "device type": ({"device": "cuda:0"}, InvalidArgumentError, "'shm' has no device type 'cuda'"),
    "name": ({"name": ""}, InvalidArgumentError, "name='' is no name"),
    "name type": ({"name": 5}, InvalidArgumentError, "name=5 is no name"),
    "timeout": ({"timeout": -1}, InvalidArgumentError, "timeout=-1 is no duration"),
    "hint": ({"hints": {"slot_byte": "1M"}}, InvalidArgumentError, "knows no hint 'slot_byte'"),
    "hint value": ({"hints": {"slot_bytes": "big"}}, InvalidArgumentError, "unreadable value 'big'"),
    "hint of no bytes": ({"hints": {"slot_bytes": "0"}}, InvalidArgumentError, "positive size"),
    "hint type": ({"hints": {"slot_bytes": 4096}}, InvalidArgumentError, "not text"),
    "hints type": ({"hints": "slot_bytes=1"}, InvalidArgumentError, "no mapping"),
    "rank alone": ({"rank": 0}, InvalidArgumentError, "rank and size go together"),
    "size alone": ({"size": 2}, InvalidArgumentError, "rank and size go together"),
    "rank beyond": ({"rank": 2, "size": 2}, InvalidArgumentError, "not in range"),
    "rank negative": ({"rank": -1, "size": 2}, InvalidArgumentError, "not in range"),
    "rank type": ({"rank": "0", "size": 2}, InvalidArgumentError, "no whole numbers"),
    "no store": ({"rank": 0, "size": 2}, InvalidArgumentError, "2 ranks need a store"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    arguments, error, says = REFUSED[what]
    with pytest.raises(error, match=says) as caught:
        unicomm.new_comm(**{"backend": "shm", "device": CPU, **arguments})
    assert caught.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_unsupported(raised):
    error = raised(unicomm.new_comm, "nccl", torch.device("cuda"))
    assert isinstance(error, unicomm.UnsupportedError)
    assert "no device of type 'cuda'" in str(error)
    assert "doctor" in error.hint


@pytest.mark.parametrize("half", [{"WORLD_SIZE": "2"}, {"RANK": "1"}, {"RANK": "one", "WORLD_SIZE": "2"}])
def test_a_rank_that_is_given_needs_no_variables(half, monkeypatch, raised):
    """Programs that start their ranks by multiprocessing often set WORLD_SIZE alone."""
    for name, value in half.items():
        monkeypatch.setenv(name, value)
    assert isinstance(raised(unicomm.new_comm, "shm", CPU), InvalidArgumentError)
    with unicomm.new_comm("shm", CPU, rank=0, size=1) as comm:
        check_sum(comm)


def test_the_third_positional_argument_is_the_name(raised):
    with unicomm.new_comm("fake", CPU, "replica") as comm:
        assert comm.get_name() == "replica"
    assert "name=False" in str(raised(unicomm.new_comm, "fake", CPU, False))


def test_a_close_name_is_suggested(raised):
    assert "did you mean 'gloo'?" in raised(unicomm.new_comm, "glo", CPU).hint
    assert "did you mean 'p2p_bytes'?" in raised(unicomm.new_comm, "shm", CPU, hints={"p2p_byte": "1"}).hint


def test_default_timeout(monkeypatch):
    assert unicomm.new_comm("fake", CPU).get_timeout() == 600
    monkeypatch.setenv("TORCHCOMM_TIMEOUT_SECONDS", "12.5")
    assert unicomm.new_comm("fake", CPU).get_timeout() == 12.5
    assert unicomm.new_comm("fake", CPU, timeout=3).get_timeout() == 3
    for bad in ("-1", "soon", "0"):
        monkeypatch.setenv("TORCHCOMM_TIMEOUT_SECONDS", bad)
        with pytest.raises(InvalidArgumentError, match="no positive number"):
            unicomm.new_comm("fake", CPU)


def test_a_rank_that_does_not_come(raised):
    store = HashStore()
    began = time.monotonic()

    def rank(r: int) -> BaseException | None:
        if r == 1:
            return None
        if r == 2:  # gives up when rank 0 has come
            store.wait(["unicomm/x/world/0/0/0"])
        timeout = 0.1 if r == 2 else 60
        return raised(unicomm.new_comm, "shm", CPU, name="x", store=store, rank=r, size=N, timeout=timeout)

    for r, error in enumerate(on_ranks(rank)):
        if r != 1:
            assert type(error) is CommTimeoutError
            assert error.culprits == (1,)
            assert (error.comm, error.rank) == ("x", r)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("odd", [{"hints": {"slot_bytes": "8K"}}, {"backend": "gloo"}, {"size": N + 1}])
def test_other_options_on_one_rank(odd, raised):
    store = HashStore()

    def rank(r: int) -> BaseException:
        given: dict[str, Any] = {"backend": "shm", "device": CPU, "store": store, "rank": r, "size": N}
        return raised(unicomm.new_comm, **{**given, "timeout": 30, **(odd if r == 2 else {})})

    for error in on_ranks(rank):
        assert type(error) is MismatchError, repr(error)
        assert error.culprits == (2,)
        assert next(iter(odd)) in error.message


def test_a_rank_that_cannot_connect_tells_the_others(raised):
    """They need not wait for their timeout."""

    class Broken(ShmBackend):
        name = "broken"

        @classmethod
        def connect(cls, setup):
            if setup.rank == 1:
                raise BackendError("no such thing here")
            return super().connect(setup)

    unicomm.register_backend("broken", Broken)
    store = HashStore()
    began = time.monotonic()

    def rank(r: int) -> BaseException:
        return raised(unicomm.new_comm, "broken", CPU, store=store, rank=r, size=N, timeout=50)

    errors = on_ranks(rank)
    assert [type(e) for e in errors] == [PeerLostError, BackendError, PeerLostError]
    assert errors[0].culprits == errors[2].culprits == (1,)
    assert "no such thing here" in errors[0].message
    assert time.monotonic() - began < 20


def test_registering_backends():
    class Mine(ShmBackend):
        name = "mine-too"

    unicomm.register_backend("mine-too", Mine)
    unicomm.register_backend("mine-too", Mine)
    assert {"shm", "gloo", "fake", "mine-too"} <= set(unicomm.backend_names())
    assert run_ranks(lambda comm: comm.get_backend(), 2, backend="mine-too") == ["mine-too"] * 2
    for name, what in (("shm", Mine), ("mine-too", ShmBackend)):
        with pytest.raises(InvalidArgumentError, match="exists already"):
            unicomm.register_backend(name, what)
    for what in (object, Mine.connect, None):
        with pytest.raises(InvalidArgumentError, match="is no backend"):
            unicomm.register_backend("not-a-backend", what)


@pytest.mark.parametrize(
    ("version", "says", "cure"),
    [
        (PROTOCOL_VERSION + 1, "is written for version 2", "upgrade unicomm"),
        (PROTOCOL_VERSION - 1, "is written for version 0", "install a release of the backend"),
        ("1", "is written for version '1'", "install a release of the backend"),
        (None, "states no version", "write protocol_version = 1"),
    ],
)
@pytest.mark.parametrize("installed", [False, True])
def test_a_backend_of_another_protocol_version(monkeypatch, raised, version, says, cure, installed):
    class Other(FakeBackend):
        name = "other"
        protocol_version = version

        @classmethod
        def connect(cls, setup):
            raise AssertionError("never called")

    entry = types.SimpleNamespace(name="other", value="pack:Other", load=lambda: Other)
    if installed:
        monkeypatch.setattr(registry, "_installed", lambda: {"other": entry})
        error = raised(unicomm.new_comm, "other", CPU, rank=0, size=2, store=HashStore(), timeout=0.1)
    else:
        error = raised(unicomm.register_backend, "other", Other)
    assert type(error) is UnsupportedError
    assert f"{says} of the backend protocol" in error.message
    assert cure in error.hint
    assert "other" not in registry._registered


def test_built_in_backends_are_of_this_protocol_version():
    for name in registry._BUILT_IN:
        assert find_backend(name).protocol_version == PROTOCOL_VERSION


def test_many_at_once():
    """Communicators of different names are created concurrently by several threads of each rank."""
    store = HashStore()
    threads = 4

    def work(r: int, t: int) -> None:
        with unicomm.new_comm("shm", CPU, name=f"c{t}", store=store, rank=r, size=2, timeout=60) as comm:
            check_sum(comm)

    def rank(r: int) -> None:
        results([partial(work, r, t) for t in range(threads)])

    on_ranks(rank, 2)


def test_members_of_the_package():
    assert unicomm.TorchComm is Communicator
    assert all(getattr(unicomm, name) is not None for name in unicomm.__all__)
    assert set(unicomm.__all__) <= set(dir(unicomm))
    with pytest.raises(AttributeError, match="has no attribute 'all_reduce'"):
        unicomm.all_reduce  # noqa: B018
