"""Batches, persistent all-gather, Python objects, and what a communicator tells of itself."""

import pickle

import pytest
import torch

import unicomm
from unicomm import objcol
from unicomm.testing import run_ranks


def test_a_batch_cannot_block_itself():
    """Everyone sends more than the transport holds before anyone receives."""

    def program(comm):
        n, me = comm.get_size(), comm.get_rank()
        outs = {r: torch.empty(1_000_003, dtype=torch.int32) for r in range(n) if r != me}
        batch = comm.batch_op_create()
        for r in outs:
            batch.send(torch.full((1_000_003,), 10 * me + r, dtype=torch.int32), r)
        for r, out in outs.items():
            batch.recv(out, r)
        assert len(batch.ops) == 2 * (n - 1)
        batch.issue(True).wait()
        assert batch.ops == []
        return all(bool((out == 10 * r + me).all()) for r, out in outs.items())

    assert run_ranks(program, 4) == [True] * 4


def test_empty_batches_are_refused_and_bad_ones_keep_their_entries():
    def program(comm):
        batch = comm.batch_op_create()
        with pytest.raises(unicomm.InvalidArgumentError, match="empty batch"):
            batch.issue(False)
        batch.send(torch.ones(2), 1 - comm.get_rank()).send(torch.ones(2), 9)
        with pytest.raises(unicomm.InvalidArgumentError, match=r"range \[0, 2\)"):
            batch.issue(False)
        assert len(batch.ops) == 2
        comm.barrier(False)

    run_ranks(program, 2)


def test_persistent_all_gather():
    def program(comm):
        n, me = comm.get_size(), comm.get_rank()
        out = torch.empty(2 * n)
        handle = comm.all_gather_p_init(out)
        seen = []
        for i in range(4):
            comm.all_gather_p_exec(handle, torch.full((2,), float(me + i)), i % 2 == 0).wait()
            seen.append(out[::2].tolist())
        with pytest.raises(unicomm.InvalidArgumentError, match="are needed"):
            comm.all_gather_p_exec(handle, torch.ones(3), False)
        other = comm.split(list(range(n)), "other")
        with pytest.raises(unicomm.InvalidArgumentError, match="belongs to"):
            other.all_gather_p_exec(handle, torch.ones(2), False)
        comm.all_gather_p_free(handle)
        with pytest.raises(unicomm.NotReadyError, match="freed"):
            comm.all_gather_p_exec(handle, torch.ones(2), False)
        with pytest.raises(unicomm.InvalidArgumentError, match="share equally"):
            comm.all_gather_p_init(torch.empty(2 * n + 1))
        other.finalize()
        return seen

    assert run_ranks(program, 3) == [[[0.0 + i, 1.0 + i, 2.0 + i] for i in range(4)]] * 3


class Custom:
    def __eq__(self, other):
        return isinstance(other, Custom)

    __hash__ = None


OBJECTS = [
    None,
    3,
    "text",
    b"bytes",
    b"",
    {"empty": (b"", [])},
    [1, (2, 3)],
    {"a": {1, 2}, "b": 2.5},
    torch.arange(6).reshape(2, 3),
    "x" * 70_000,
]


def same(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp"])
def test_objects(backend, world):
    def program(comm):
        n, me = comm.get_size(), comm.get_rank()
        for i in range(len(OBJECTS)):
            mine = OBJECTS[(i + me) % len(OBJECTS)]
            theirs = [OBJECTS[(i + r) % len(OBJECTS)] for r in range(n)]
            got = [None] * n
            objcol.all_gather_object(comm, got, mine)
            assert all(same(a, b) for a, b in zip(got, theirs, strict=True))
            got = [None] * n if me == n - 1 else None
            objcol.gather_object(comm, mine, got, root=n - 1)
            assert got is None or all(same(a, b) for a, b in zip(got, theirs, strict=True))
            shared = [mine, me] if me == 0 else [None, None]
            objcol.broadcast_object_list(comm, shared)
            assert same(shared[0], OBJECTS[i])
            assert shared[1] == 0
            out = [None]
            objcol.scatter_object_list(comm, out, theirs if me == 0 else None)
            assert same(out[0], theirs[me])
        if n > 1 and me < 2:
            if me == 0:
                objcol.send_object_list(comm, [1, "two"], 1)
            else:
                got = [None, None]
                objcol.recv_object_list(comm, got, 0)
                assert got == [1, "two"]
        return True

    assert run_ranks(program, world, backend=backend) == [True] * world


def test_the_safe_codec_refuses_before_anything_is_sent():
    def program(comm):
        if comm.get_rank() == 0:
            with pytest.raises(unicomm.InvalidArgumentError, match="Custom cannot travel safely"):
                objcol.all_gather_object(comm, [None, None], Custom())
            with pytest.raises(unicomm.InvalidArgumentError, match="codec 'json' is unknown"):
                objcol.all_gather_object(comm, [None, None], 1, codec="json")
        got = [None, None]
        objcol.all_gather_object(comm, got, Custom(), codec="pickle")
        return got == [Custom(), Custom()]

    assert run_ranks(program, 2) == [True, True]


def test_a_message_cannot_execute_code():
    """What a hostile sender puts on the wire is refused by the receiver."""

    class Bomb:
        def __reduce__(self):
            return (exec, ("raise SystemExit('executed')",))

    def program(comm):
        if comm.get_rank() == 0:
            objcol.send_object_list(comm, [Bomb()], 1, codec="pickle")
            return None
        with pytest.raises(unicomm.MismatchError, match="object from rank 0 cannot be read") as caught:
            objcol.recv_object_list(comm, [None], 0)
        assert isinstance(caught.value.__cause__, pickle.UnpicklingError)
        return "alive"

    assert run_ranks(program, 2) == [None, "alive"]


@pytest.mark.parametrize("objects", [None, [], [None] * 3, (None, None)])
def test_object_lists_must_fit(objects):
    def program(comm):
        with pytest.raises(unicomm.InvalidArgumentError, match="one entry per rank"):
            objcol.all_gather_object(comm, objects, 1)
        comm.barrier(False)

    run_ranks(program, 2)


def test_what_it_tells_of_itself():
    def program(comm):
        assert comm.get_rank() in (0, 1)
        assert comm.get_size() == 2
        assert comm.get_ranks() == [0, 1]
        assert comm.get_name() == "ranks"
        assert comm.get_backend() == "shm"
        assert comm.get_backend_version().startswith("native core")
        assert comm.get_device() == torch.device("cpu")
        assert comm.get_options().timeout == 30.0
        assert comm.get_capabilities().checks_mismatch
        assert 0 < comm.memory()["segment"] <= 2 * 3 * 1024 * 1024
        assert comm.unsafe_backend is not None
        assert not comm.is_aborted()
        assert "open" in repr(comm)
        return comm.get_uid()

    a, b = run_ranks(program, 2)
    assert a == b
    assert a != run_ranks(lambda comm: comm.get_uid(), 2)[0]


@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp", "fake"])
def test_what_no_backend_can_yet(backend):
    def program(comm):
        if backend != "shm":
            with pytest.raises(
                unicomm.UnsupportedError, match=f"backend '{backend}' has no one-sided access"
            ):
                comm.new_window()
        with pytest.raises(unicomm.UnsupportedError, match="takes no hints for one operation"):
            comm.barrier(False, hints={"fast": "yes"})
        comm.barrier(False)

    run_ranks(program, 2, backend=backend)
