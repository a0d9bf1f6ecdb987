"""The backend ucx over the real library: its interface, its effects on the process, and waiting."""

import ctypes
import json
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import unicomm
from tests import ROOT
from tests.commands import run
from tests.ucx_here import needs_ucx
from unicomm.backends.out_of_band.fault_channel import FaultChannel
from unicomm.backends.ucx import backend
from unicomm.backends.ucx.backend import _worker
from unicomm.backends.ucx.library import UCX, open_library
from unicomm.backends.vendor.library_search import in_packages
from unicomm.testing import run_ranks

pytestmark = needs_ucx

HEADERS = Path(__file__).with_name("ucx_headers.cpp")


def test_its_headers_say_what_is_declared_here():
    libraries = in_packages(UCX.packages)
    compiler = shutil.which("g++") or shutil.which("clang++")
    if not libraries or compiler is None:
        pytest.skip("no package libucx, or no C++ compiler")
    include = libraries[0].parent.parent / "include"
    done = run([compiler, "-std=c++20", "-fsyntax-only", f"-I{include}", f"-I{ROOT / 'csrc'}", str(HEADERS)])
    assert done.returncode == 0, done.stderr


def test_every_function_of_the_table_is_there():
    library = open_library()
    assert library.version >= (1, 10, 0)
    assert [name for name, _, there in library.functions() if not there] == []


def test_opening_installs_no_signal_handlers():
    """UCX would catch fatal signals, which the recorder and Python's faulthandler have to see."""
    code = (
        "import json, unicomm\n"
        "from unicomm.backends.ucx.library import open_library\n"
        "def caught():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(line for line in lines if line.startswith('SigCgt'))\n"
        "unicomm.new_comm('shm', 'cpu', rank=0, size=1).finalize()\n"
        "before = caught()\n"
        "open_library()\n"
        "unicomm.new_comm('ucx', 'cpu', rank=0, size=1).finalize()\n"
        "print(json.dumps([before, caught()]))\n"
    )
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    # Those of the C library for its threads, 32 and 33, come with the first thread.
    before, after = (
        int(line.split()[1], 16) & ~(3 << 31) for line in json.loads(done.stdout.splitlines()[-1])
    )
    assert before == after


def test_a_file_that_is_no_ucx(tmp_path):
    hints = {"library": str(tmp_path / "no.so")}
    code = (
        "import unicomm\n"
        f"try: unicomm.new_comm('ucx', 'cpu', rank=0, size=1, hints={hints!r})\n"
        "except unicomm.UnsupportedError as error: print(error.message, '|', error.hint)\n"
    )
    done = run([sys.executable, "-c", code])
    assert "UCX is not on this machine" in done.stdout, done.stderr
    assert "unicomm[ucx]" in done.stdout


def test_who_waits_sleeps():
    """A rank that waits a second for another one uses less than 10 ms of its core.

    The least of three waits: on a busy machine a wait is charged with the caches that others have emptied.
    """

    def waited(comm):
        comm.barrier(async_op=False)
        if comm.get_rank() == 1:
            time.sleep(1.0)
        before = time.thread_time()
        comm.barrier(async_op=False)
        return time.thread_time() - before

    spent = run_ranks(lambda comm: [waited(comm) for _ in range(3)], 2, backend="ucx")[0]
    assert min(spent) < 0.010


def test_many_messages_are_under_way_without_a_thread_each():
    def program(comm):
        me, n = comm.get_rank(), 300
        tensors = [torch.full((1000,), float(i)) for i in range(n)]
        batch = comm.batch_op_create()
        if me == 0:
            for x in tensors:
                batch.send(x, 1)
        else:
            tensors = [torch.zeros(1000) for _ in range(n)]
            for x in tensors:
                batch.recv(x, 0)
        batch.issue(async_op=False)
        return [float(x[-1]) for x in tensors]

    assert run_ranks(program, 2, backend="ucx") == [[float(i) for i in range(300)]] * 2


def test_a_device_that_comes_late(monkeypatch):
    """A link that is down for a moment hides its device from the UCX that is made then."""
    made = []

    def worker(setup, library, spin):
        alone = {"tls": "self"} if setup.rank == 1 and 1 not in made else {}
        made.append(setup.rank)
        return _worker(replace(setup, hints=setup.hints | alone), library, spin)

    monkeypatch.setattr(backend, "_worker", worker)
    monkeypatch.setattr(backend, "_PAUSE", 0.0)

    def program(comm):
        x = torch.ones(4)
        comm.all_reduce(x, unicomm.ReduceOp.SUM, async_op=False)
        return float(x[0])

    assert run_ranks(program, 2, backend="ucx") == [2.0] * 2
    assert sorted(made) == [0, 0, 1, 1]


@pytest.mark.parametrize("operation", ["message", "collective"])
def test_whose_connection_has_ended_is_named_even_if_nobody_tells(operation, monkeypatch, raised):
    """As when a link is cut: UCX may notice it before the connections for failures do."""
    monkeypatch.setattr(FaultChannel, "explain", lambda channel, awaits: None)
    over = threading.Event()

    def program(comm):
        if comm.get_rank() == 1:
            comm.unsafe_backend.worker.drop()
        if comm.get_rank() != 0:
            assert over.wait(60)
            return
        if operation == "message":
            error = raised(comm.recv, torch.ones(4), 1, False)
        else:
            error = raised(comm.barrier, False)
        over.set()
        assert type(error) is unicomm.PeerLostError
        assert error.culprits == (1,)
        assert "rank 1 is gone (" in error.message

    run_ranks(program, 3 if operation == "message" else 2, backend="ucx", timeout=60)


def test_an_error_of_a_split_names_global_ranks(monkeypatch):
    together = threading.Barrier(3)

    def program(comm):
        if comm.get_rank() == 0:
            lost = unicomm.PeerLostError("rank 1 is gone", dead=[1])
            monkeypatch.setattr(backend, "_AT_MOST", (0.0, 0.0))  # no rank gets a message in time
            monkeypatch.setattr(backend.UcxBackend, "fault", lambda b: lost if b._size == 2 else None)
        together.wait()
        try:
            comm.split([1, 2] if comm.get_rank() else [0], "child")
        except unicomm.PeerLostError as error:
            return error.culprits, error.message
        return None

    # One of the two may hear that the other has left because of it.
    assert ((2,), "rank 1 is gone (global rank 2)") in run_ranks(program, 3, backend="ucx")


@pytest.mark.parametrize("between", ["ucx", "gloo"])
def test_auto_takes_what_the_hint_says(between):
    said = run_ranks(
        lambda comm: (comm.get_backend(), comm.get_backend_version()),
        3,
        backend="auto",
        hints={"hosts": "a,a,b", "between": between},
    )
    assert {name for name, _ in said} == {"hosts"}
    assert all(f"; {between}: " in version for _, version in said)


def test_a_wish_for_ucx_where_a_rank_has_none(monkeypatch):
    from unicomm.backends import auto

    monkeypatch.setattr(auto, "why_not", lambda path: "there is none")
    with pytest.raises(unicomm.UnsupportedError, match=r"no ucx between hosts, ranks? 0"):
        run_ranks(lambda comm: None, 2, backend="auto", hints={"hosts": "a,b", "between": "ucx"})


def test_a_lack_of_memory_concerns_only_a_wait_that_meets_it():
    """UCX may lack memory in this thread at another time, such as while it makes a worker."""
    open_library()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    ucs = ctypes.CDLL(next(file for file in mapped if Path(file).name.startswith("libucs.so")))
    settings = ctypes.create_string_buffer(256)  # a logging part of UCX, without a name

    def program(comm):
        said = b"Failed to allocate memory pool"
        ucs.ucs_log_dispatch(b"mpool.c", 1, b"grow", 1, settings, said)
        comm.barrier(False)

    run_ranks(program, 2, backend="ucx")
