"""Memory of the library, registration and windows, over the mock."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import unicomm
from tests.mocks.nccl.kinds import of, streams_of
from unicomm import Communicator
from unicomm.backends.nccl import registered_memory
from unicomm.comms.errors import (
    CommTimeoutError,
    InvalidArgumentError,
    MismatchError,
    NotReadyError,
    UnsupportedError,
)
from unicomm.comms.memory.window import WindowAccess
from unicomm.testing import conformance, run_ranks

SUM = unicomm.ReduceOp.SUM
WITH_MEMORY = ["nccl-new", "nccl-one-sided", "rccl-old"]
WITH_WINDOWS = ["nccl-new", "nccl-one-sided"]
HAS = {
    "nccl-new": (True, {"local", "symmetric"}, True),
    "nccl-one-sided": (True, {"local", "symmetric"}, True),
    "nccl-old": (False, set(), False),
    "rccl-old": (True, {"local"}, False),
}


@pytest.mark.parametrize("name", HAS)
def test_capabilities_are_those_of_the_version(name):
    of(name)

    def program(comm: Communicator) -> tuple[bool, set[str], bool]:
        x = torch.ones(4)
        backend = comm.unsafe_backend
        kinds = {
            kind
            for kind, symmetric in (("local", False), ("symmetric", True))
            if _can(backend.registered_range, x, symmetric)
        }
        return _can(backend.check_allocates), kinds, _can(backend.one_sided)

    assert run_ranks(program, 1, backend=name) == [HAS[name]]


def _can(call, *arguments) -> bool:
    try:
        call(*arguments)
    except UnsupportedError:
        return False
    except InvalidArgumentError:  # it could, with another tensor
        return True
    return True


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_tensors_lie_in_the_librarys_memory_and_go_back_to_it(name):
    backend = of(name)

    def program(comm: Communicator) -> None:
        memory = comm.mem_allocator
        gc.collect()  # tensors of earlier tests
        before = memory.allocated()
        x = memory.empty(3, 5, dtype=torch.float16)
        assert (x.shape, x.dtype, x.is_contiguous()) == ((3, 5), torch.float16, True)
        assert memory.allocated() == before + 30
        assert memory.holds(x)
        assert memory.holds(x[1:])
        assert not memory.holds(torch.ones(3))
        assert backend.opened.native.block_of(x.data_ptr() + 29) == (x.data_ptr(), 30)
        assert backend.opened.native.block_of(x.data_ptr() + 30) == (0, 0)
        view = x[2]
        del x
        gc.collect()
        assert memory.allocated() == before + 30
        del view
        gc.collect()
        assert memory.allocated() == before
        assert memory.empty(0, 4).shape == (0, 4)

    run_ranks(program, 1, backend=name)


def test_there_is_not_enough(raised):
    of("nccl-new")

    def program(comm: Communicator) -> BaseException:
        return raised(comm.mem_allocator.empty, 1 << 60)

    (error,) = run_ranks(program, 1, backend="nccl-new")
    assert type(error) is unicomm.BackendError


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_operations_on_it(name):
    """The conformance suite takes tensors from the allocator by itself; here with registered ones."""
    of(name)

    def program(comm: Communicator) -> None:
        assert conformance.check(comm, "all_reduce", lambda case: case.count == 17) > 3
        x = comm.mem_allocator.empty(1000).fill_(comm.get_rank() + 1)
        comm.mem_allocator.tensor_register(x)
        comm.all_reduce(x, SUM, True).wait_blocking()
        assert set(x.tolist()) == {6.0}
        comm.mem_allocator.tensor_deregister(x)

    run_ranks(program, 3, backend=name)


def test_the_pool_is_torchs(raised):
    """Only its refusal can be seen here: this torch has no CUDA. tests/gpu has the pool itself."""
    of("nccl-new")
    (error,) = run_ranks(lambda comm: raised(lambda: comm.mem_allocator.pool), 1, backend="nccl-new")
    assert type(error) is UnsupportedError


# --- registration ----------------------------------------------------------------------------------------


class Changed:
    """A library's functions, some of which are replaced: `changes[name]` gets the real one first."""

    def __init__(self, real: Any, changes: dict[str, Callable[..., Any]]) -> None:
        self._real, self._changes = real, changes

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._real, name)
        return partial(self._changes[name], function) if name in self._changes else function


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_blocks_are_registered_once_and_until_the_last_tensor_is_not(name, monkeypatch, raised):
    seen: list[tuple[str, int]] = []

    def note(function: str, real: Callable[..., Any], comm: int, at: int, *more: int) -> Any:
        seen.append((function, at))
        return real(comm, at, *more)

    changes = {function: partial(note, function) for function in ("register", "deregister")}
    library = of(name).opened
    monkeypatch.setattr(library, "native", Changed(library.native, changes))

    def program(comm: Communicator) -> int:
        memory = comm.mem_allocator
        x = memory.empty(64)
        for part in (x, x[16:], x[32:]):
            memory.tensor_register(part)
        assert type(raised(memory.tensor_register, x)) is InvalidArgumentError
        for part in (x[16:], x):
            memory.tensor_deregister(part)
        assert type(raised(memory.tensor_deregister, x)) is InvalidArgumentError
        assert len(seen) == 1
        memory.tensor_deregister(x[32:])
        own = torch.ones(8)  # not the library's, which takes it all the same
        memory.tensor_register(own)
        return own.data_ptr()

    (own,) = run_ranks(program, 1, backend=name)
    assert [function for function, _ in seen] == ["register", "deregister", "register", "deregister"]
    assert seen[2][1] == own  # and the last is finalize's


@pytest.mark.parametrize("name", WITH_WINDOWS)
def test_symmetric_registration_is_agreed_on(name, raised):
    of(name)

    def program(comm: Communicator) -> None:
        memory = comm.mem_allocator
        x = memory.empty(2000).fill_(1)
        memory.tensor_register(x, symmetric=True)
        comm.all_reduce(x, SUM, False).wait_blocking()
        assert x[7] == 3
        memory.tensor_deregister(x)
        other = memory.empty(2000 if comm.get_rank() else 3000)
        error = raised(memory.tensor_register, other, symmetric=True)
        assert type(error) is MismatchError
        assert error.culprits == (0,)
        comm.barrier(False)
        odd = torch.ones(4096)[1:]
        assert "at no multiple of 4096" in str(raised(memory.tensor_register, odd, True))
        assert type(raised(memory.tensor_register, memory.empty(0))) is InvalidArgumentError
        memory.tensor_register(memory.empty(2000), symmetric=True)  # left to finalize

    run_ranks(program, 3, backend=name)


@pytest.mark.parametrize("name", ["nccl-old", "rccl-old"])
def test_what_older_libraries_lack(name, raised):
    of(name)

    def program(comm: Communicator) -> None:
        if name == "nccl-old":
            error = raised(lambda: comm.mem_allocator)
            assert type(error) is UnsupportedError
            assert "has no ncclMemAlloc" in error.message
            assert "NCCL 2.19.0" in error.hint
            return
        memory = comm.mem_allocator
        error = raised(memory.tensor_register, memory.empty(4), symmetric=True)
        assert type(error) is UnsupportedError
        assert "has no ncclCommWindowRegister" in error.message
        assert "NCCL 2.27.0" in error.hint
        error = raised(comm.new_window, memory.empty(4))
        assert type(error) is UnsupportedError
        assert "has no ncclPutSignal" in error.message
        assert "NCCL 2.29.2" in error.hint
        comm.barrier(False)

    run_ranks(program, 2, backend=name)


def test_on_shared_memory_nothing_has_to_be_registered(raised):
    def program(comm: Communicator) -> None:
        x = comm.mem_allocator.empty(100)
        comm.mem_allocator.tensor_register(x, symmetric=True)
        comm.mem_allocator.tensor_deregister(x)
        error = raised(comm.mem_allocator.tensor_register, torch.ones(3))
        assert type(error) is UnsupportedError
        assert "mem_allocator.empty" in error.hint

    run_ranks(program, 2)


# --- windows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocking", ["1", "0"])
@pytest.mark.parametrize("name", WITH_WINDOWS)
def test_put_and_signals(name, raised, blocking):
    of(name)

    def program(comm: Communicator) -> None:
        n, me = comm.get_size(), comm.get_rank()
        after, before = (me + 1) % n, (me - 1) % n
        # Of another size in front of it on each rank: offsets differ, blocks do not.
        room = comm.mem_allocator.empty(32).zero_()[me : me + 8]
        window = comm.new_window(room)
        assert window.get_size() == 32
        assert window.get_attr(after).access_type is WindowAccess.SEPARATE
        for step in range(20):
            window.put(torch.tensor([float(step), me]), after, 3, False)
            window.signal(after, False)
            window.wait_signal(before, False)
            streams_of(comm).synchronize()
            assert room.tolist() == [0, 0, 0, step, before, 0, 0, 0]
            window.signal(before, False)
            window.wait_signal(after, False)
        window.tensor_deregister()
        assert type(raised(window.put, torch.ones(1), after, 0, False)) is NotReadyError
        window.tensor_register(room)
        window.put(torch.ones(1), after, 0, False)
        window.barrier()
        assert room[0] == 1
        window.free()
        assert type(raised(window.signal, after, False)) is NotReadyError

    run_ranks(program, 3, backend=name, hints={"blocking": blocking})


@pytest.mark.parametrize("name", WITH_WINDOWS)
def test_what_is_put_need_not_be_in_a_window(name, monkeypatch, tmp_path):
    """The library sends only from windows. What is elsewhere is copied to one, in the order of the puts."""
    of(name)
    log = tmp_path / "calls"
    monkeypatch.setenv("NCCL_MOCK_LOG", str(log))

    def program(comm: Communicator) -> tuple[int, int]:
        other = 1 - comm.get_rank()
        room, registered = comm.mem_allocator.empty(6).zero_(), comm.mem_allocator.empty(2).fill_(7)
        window = comm.new_window(room)
        comm.mem_allocator.tensor_register(registered, symmetric=True)
        elsewhere = [torch.full((2,), float(i)) for i in (1, 2)]
        streams_of(comm).sleep(50)  # so that copies and puts wait for each other
        for at, (source, async_op) in enumerate(
            [(elsewhere[0], False), (elsewhere[1], True), (registered, False)]
        ):
            window.put(source, other, 2 * at, async_op)
            window.signal(other, async_op)
        for _ in range(3):
            window.wait_signal(other, False).wait_blocking()
        assert room.tolist() == [1, 1, 2, 2, 7, 7]
        comm.barrier(False)
        window.put(room[:2], other, 2, False)
        window.barrier()
        assert room.tolist() == [1, 1, 1, 1, 7, 7]
        window.free()
        comm.mem_allocator.tensor_deregister(registered)
        return registered.data_ptr(), room.data_ptr()

    places = run_ranks(program, 2, backend=name)
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    sent = [[c["send"] for c in calls if c["function"] == "ncclPutSignal" and c["rank"] == r] for r in (0, 1)]
    assert [tuple(sent[r][2:]) for r in (0, 1)] == places  # these without a copy
    assert all(first == second for first, second, *_ in sent)
    made = [sum(c["function"] == f"nccl{name}" for c in calls) for name in ("MemAlloc", "MemFree")]
    assert made[0] >= made[1] > 0


def test_blocks_for_puts_go_with_their_windows(monkeypatch, tmp_path):
    of("nccl-new")
    gc.collect()  # nothing of another test is freed meanwhile
    log = tmp_path / "calls"
    monkeypatch.setenv("NCCL_MOCK_LOG", str(log))

    def program(comm: Communicator) -> None:
        room = comm.mem_allocator.empty(8)
        for _ in range(3):
            comm.new_window(room).free()
        comm.new_window(room)  # goes with the communicator

    run_ranks(program, 2, backend="nccl-new")
    gc.collect()
    calls = [json.loads(line)["function"] for line in log.read_text().splitlines()]
    assert calls.count("ncclMemAlloc") == calls.count("ncclMemFree") == 2 * (1 + 4)


def test_a_put_that_is_too_large_to_be_copied(monkeypatch, raised):
    of("nccl-new")
    monkeypatch.setattr(registered_memory, "MOST_STAGED", 16)

    def program(comm: Communicator) -> None:
        room, other = comm.mem_allocator.empty(6).zero_(), 1 - comm.get_rank()
        window = comm.new_window(room)
        error = raised(window.put, torch.ones(5), other, 0, False)
        assert type(error) is InvalidArgumentError
        assert "a put of 20 bytes from memory in no window" in str(error)
        window.put(torch.ones(4), other, 0, False)  # the communicator is as it was
        window.barrier()
        assert room.tolist() == [1, 1, 1, 1, 0, 0]
        window.free()

    run_ranks(program, 2, backend="nccl-new")


def test_puts_do_not_count_as_signals():
    of("nccl-new")

    def program(comm: Communicator) -> None:
        me, other = comm.get_rank(), 1 - comm.get_rank()
        room = comm.mem_allocator.empty(6).zero_()
        window = comm.new_window(room)
        if me == 0:
            for i in range(6):
                window.put(torch.tensor([i + 1.0]), other, i, True)
            window.signal(other, True)
        else:
            window.wait_signal(other, True).wait_blocking()
            assert room.tolist() == [1, 2, 3, 4, 5, 6]
        window.free()

    run_ranks(program, 2, backend="nccl-new")


def test_signals_survive_a_barrier():
    """Ranks wait for all signals in a barrier; who asks for one later gets it all the same."""
    of("nccl-new")

    def program(comm: Communicator) -> None:
        other = 1 - comm.get_rank()
        window = comm.new_window(comm.mem_allocator.empty(4).zero_())
        for _ in range(3):
            window.put(torch.ones(1), other, 1, False)
            window.signal(other, False)
            window.put(torch.ones(1), other, 2, False)  # not followed by a signal
            window.barrier()
        for _ in range(3):
            window.wait_signal(other, False, timeout=5).wait_blocking()
        window.signal(other, False)
        window.wait_signal(other, False, timeout=5).wait_blocking()
        window.free()

    run_ranks(program, 2, backend="nccl-new")


@pytest.mark.parametrize(
    ("name", "hints", "most"),
    [("nccl-new", {}, 7), ("nccl-new", {"num_rma_sig": "3"}, 2), ("nccl-one-sided", {}, 1)],
)
def test_windows_at_a_time(name, hints, most, raised):
    """Each has signals of its own, as far as the library has some; a freed one's are used again."""
    of(name)

    def program(comm: Communicator) -> None:
        other = 1 - comm.get_rank()
        windows = [comm.new_window(comm.mem_allocator.empty(4)) for _ in range(most)]
        error = raised(comm.new_window, comm.mem_allocator.empty(4))
        assert type(error) is UnsupportedError
        assert "num_rma_sig" in error.hint
        for window in reversed(windows):
            window.signal(other, False)
        for window in windows:
            window.wait_signal(other, False).wait_blocking()
        windows[0].signal(other, False)  # which nobody waits for
        windows.pop(0).free()
        windows.append(comm.new_window(comm.mem_allocator.empty(4)))
        windows[-1].signal(other, False)
        windows[-1].wait_signal(other, False).wait_blocking()
        for window in windows:
            window.free()

    run_ranks(program, 2, backend=name, hints=hints)


def test_one_put_before_a_signal_where_they_are_counted_together(raised):
    of("nccl-one-sided")

    def program(comm: Communicator) -> None:
        other = 1 - comm.get_rank()
        room = comm.mem_allocator.empty(4).zero_()
        window = comm.new_window(room)
        window.signal(other, False)  # without a put
        window.put(torch.ones(2), other, 1, False)
        error = raised(window.put, torch.ones(1), other, 0, False)
        assert type(error) is UnsupportedError
        assert "2.31" in error.hint
        window.signal(other, False)
        for _ in range(2):
            window.wait_signal(other, False).wait_blocking()
        assert room[1:].tolist() == [1, 1, 0]
        window.put(torch.ones(1), other, 0, False)
        window.free()  # with a barrier, so that it is there
        assert room.tolist() == [1, 1, 1, 0]

    run_ranks(program, 2, backend="nccl-one-sided")


def test_what_is_refused(raised):
    of("nccl-new")

    def program(comm: Communicator) -> None:
        room = comm.mem_allocator.empty(8).zero_()
        assert "does not" not in str(raised(comm.new_window, torch.ones(5000)[1:]))
        window = comm.new_window(room)
        two = torch.ones(2)
        for words, call in (
            ("dst_rank must be in range", lambda: window.put(two, 1, 0, False)),
            ("elements 7 to 9 of a window of 8", lambda: window.put(two, 0, 7, False)),
            ("offset -1 is negative", lambda: window.put(two, 0, -1, False)),
            ("is of torch.float64, not torch.float32", lambda: window.put(two.double(), 0, 0, False)),
            ("has no get", lambda: window.get(two, 0, 0, False)),
            ("has no atomic", lambda: window.fetch_add(0, 0, 1)),
            ("has no atomic", lambda: window.compare_swap(0, 0, 1, 2)),
            ("cannot address", lambda: window.map_remote_tensor(0)),
            ("registered already", lambda: window.tensor_register(room)),
            ("takes no hints", lambda: window.signal(0, False, {"a": "b"})),
        ):
            error = raised(call)
            assert isinstance(error, (InvalidArgumentError, UnsupportedError))
            assert words in str(error)
        window.put(two, 0, 6, False)  # to itself
        window.signal(0, False)
        window.wait_signal(0, False).wait_blocking()
        assert room.tolist() == [0] * 6 + [1, 1]
        window.free()

    run_ranks(program, 1, backend="nccl-new")


def test_different_tensors_are_a_mismatch_on_all(raised):
    of("nccl-new")

    def program(comm: Communicator) -> None:
        wrong = comm.get_rank() == 1
        error = raised(comm.new_window, comm.mem_allocator.empty(9 if wrong else 8))
        assert type(error) is MismatchError
        assert error.culprits == (1,)
        window = comm.new_window(comm.mem_allocator.empty(8))
        window.free()

    run_ranks(program, 3, backend="nccl-new")


def test_a_signal_that_does_not_come_is_a_timeout(raised):
    of("nccl-new")

    def program(comm: Communicator) -> None:
        window = comm.new_window(comm.mem_allocator.empty(8))
        work = window.wait_signal(0, True, timeout=0.2)
        error = raised(work.wait_blocking)
        assert type(error) is CommTimeoutError
        assert error.op == "wait_signal"
        assert comm.is_aborted()

    run_ranks(program, 1, backend="nccl-new")


def test_gpus_between_which_the_library_has_no_one_sided_operations(monkeypatch, raised):
    """As NCCL says it where there are neither peers nor a network for it; the communicator goes on."""
    library = of("nccl-new").opened
    said = {
        "put_signal": lambda real, *_: 4,
        "last_error": lambda real, comm: "host RMA is not supported in this communicator",
    }
    monkeypatch.setattr(library, "native", Changed(library.native, said))

    def program(comm: Communicator) -> None:
        window = comm.new_window(comm.mem_allocator.empty(8))
        error = raised(window.put, torch.ones(1), 0, 0, False)
        assert type(error) is UnsupportedError
        assert "RMA is not supported" in error.message
        comm.barrier(False)
        window.free()

    run_ranks(program, 1, backend="nccl-new")
