"""A communicator's properties, before and after its end; its errors; its handles."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import Callable

import pytest
import torch

import unicomm
from tests import recorded
from tests.comms.calls import COLLECTIVES, call, check_sum
from unicomm import (
    CommError,
    CommTimeoutError,
    Communicator,
    DeadlockError,
    InvalidArgumentError,
    MismatchError,
    NotReadyError,
    ReduceOp,
    UnsupportedError,
    objcol,
)
from unicomm.comms.errors import PeerLostError
from unicomm.testing import run_ranks

SUM = ReduceOp.SUM


def every_way_to_communicate(comm: Communicator) -> dict[str, Callable[[bool], object]]:
    """Each operation and each thing else that needs the other ranks, by name; the flag is async_op."""
    x = torch.ones(2)
    other = (comm.get_rank() + 1) % comm.get_size()
    ways: dict[str, Callable[[bool], object]] = {name: call(comm, name).issue for name in COLLECTIVES}
    return {
        **ways,
        "send": lambda a: comm.send(x, other, a),
        "recv": lambda a: comm.recv(x, other, a),
        "batch": lambda a: comm.batch_op_create().send(x, other).issue(a),
        "split": lambda a: comm.split([comm.get_rank()]),
        "init": lambda a: comm.all_gather_p_init(x),
        "objects": lambda a: objcol.all_gather_object(comm, [None] * comm.get_size(), 1),
    }


@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp", "fake"])
def test_after_finalize(backend, raised):
    """Nothing communicates any more, nothing is recorded, and what it was can still be asked."""
    over = threading.Barrier(2, timeout=30)

    def program(comm: Communicator) -> None:
        handle = comm.all_gather_p_init(torch.zeros(4))
        batch = comm.batch_op_create().send(torch.ones(1), 1 - comm.get_rank())
        before = (comm.get_rank(), comm.get_size(), comm.get_ranks(), comm.get_uid(), comm.memory())
        comm.finalize()
        comm.finalize()
        over.wait()
        total = recorded.total()
        ways = every_way_to_communicate(comm)
        for way in (*ways.values(), batch.issue):
            for async_op in (False, True):
                error = raised(way, async_op)
                assert type(error) is NotReadyError, repr(error)
                assert (error.comm, error.rank) == ("ranks", comm.get_rank())
                assert error.op in ways
                assert "finalized" in error.message
        assert len(batch.ops) == 1
        assert type(raised(comm.all_gather_p_exec, handle, torch.ones(2), False)) is NotReadyError
        comm.all_gather_p_free(handle)
        comm.abort()
        assert not comm.is_aborted()
        over.wait()
        assert recorded.total() == total
        assert before == (comm.get_rank(), comm.get_size(), comm.get_ranks(), comm.get_uid(), comm.memory())
        assert repr(comm) == f"<Communicator 'ranks' {backend} rank {comm.get_rank()}/2 on cpu, finalized>"

    run_ranks(program, 2, backend=backend)


@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp", "fake"])
def test_properties(backend):
    def program(comm: Communicator) -> None:
        assert comm.get_size() == 3
        assert comm.get_ranks() == [0, 1, 2]
        comm.get_ranks().clear()
        assert comm.get_ranks() == [0, 1, 2]  # a copy
        assert comm.get_backend() == backend
        assert isinstance(comm.get_backend_version(), str)
        assert comm.get_device() == torch.device("cpu")
        assert comm.get_timeout() == comm.get_options().timeout == 30
        options = comm.get_options()
        assert isinstance(options, unicomm.CommOptions)
        assert (options.abort_process_on_timeout_or_error, options.enable_reconfigure) == (False, False)
        assert options.hints == {}
        capabilities = comm.get_capabilities()
        assert capabilities.checks_mismatch == (backend != "fake")
        assert capabilities.one_host == (backend == "shm")
        assert capabilities.moves_data == (backend != "fake")
        assert bool(comm.memory()) == (backend == "shm")
        assert type(comm.unsafe_backend).name == backend
        assert repr(comm) == f"<Communicator 'ranks' {backend} rank {comm.get_rank()}/3 on cpu, open>"

    run_ranks(program, 3, backend=backend)


def test_unsupported(raised):
    """Refused before anything happens, whatever the arguments."""

    def program(comm: Communicator) -> None:
        refused = {
            "reconfigure": lambda: comm.reconfigure(1, ["handles"], timeout=3),
            "get_init_handle": comm.get_init_handle,
        }
        for op, ask in refused.items():
            error = raised(ask)
            assert type(error) is UnsupportedError
            assert (error.op, error.comm, error.rank) == (
                op.replace("get_init_handle", "reconfigure"),
                "ranks",
                0,
            )
            assert "backend 'shm'" in error.message
            assert error.hint
        assert check_sum(comm).seq == 1

    run_ranks(program, 1)


@pytest.mark.parametrize(
    "hints", [{"slot_bytes": "1"}, {"slot_bytes": "4K", "p2p_bytes": "1"}, {"p2p_bytes": "3M"}]
)
def test_any_size_of_staging_memory_will_do(hints):
    """Results do not depend on it: messages and operations only take more rounds."""

    def program(comm: Communicator) -> None:
        n, me = comm.get_size(), comm.get_rank()
        ranks = torch.arange(n).float()[:, None]
        for count in (1, 700, 1024, 1025, 9001, 16384, 30011):
            base = torch.arange(count).float()
            x = base + me
            y = x.clone()
            comm.all_reduce(y, SUM, False)
            assert torch.equal(y, 3 * base + 3), count
            out = torch.zeros(n * count)
            comm.all_gather_single(out, x, False)
            assert torch.equal(out.view(n, count), base + ranks), count
            back = torch.zeros(n * count)
            comm.all_to_all_single(back, out, False)
            assert torch.equal(back.view(n, count), (base + me).expand(n, count)), count
            comm.reduce_scatter_single(y, out, SUM, False)
            assert torch.equal(y, 3 * (base + me)), count
            got = torch.zeros(count)
            comm.batch_op_create().send(x, (me + 1) % n).recv(got, (me - 1) % n).issue(False)
            assert torch.equal(got, base + (me - 1) % n), count

    run_ranks(program, 3, hints=hints)


@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp"])
def test_one_element_of_any_stride(backend):
    """Strides of a tensor with one element mean nothing: it is contiguous, and must work as such."""

    def program(comm: Communicator) -> None:
        me = comm.get_rank()
        for stride in (1, 5, 0):
            for dtype in (torch.float64, torch.bfloat16, torch.complex64):

                def one(value: float, stride: int = stride, dtype: torch.dtype = dtype) -> torch.Tensor:
                    return torch.full((6,), value).to(dtype).as_strided((1,), (stride,))

                x = one(me + 1.0)
                assert x.is_contiguous()
                comm.all_reduce(x, SUM, False)
                assert x.item() == 3
                comm.reduce(x, 0, SUM, False)
                assert x.item() == (6 if me == 0 else 3)
                comm.broadcast(x, 1, False)
                assert x.item() == 3
                outs = [one(0), one(0)]
                comm.all_gather(outs, one(me + 1.0), False)
                assert [o.item() for o in outs] == [1, 2]
                back = [one(0), one(0)]
                comm.all_to_all(back, outs, False)
                assert [o.item() for o in back] == [me + 1] * 2
                comm.batch_op_create().send(x, 1 - me).recv(back[0], 1 - me).issue(False)
                assert back[0].item() == 3

    run_ranks(program, 2, backend=backend)


def test_objects_on_the_fake_backend():
    """Lists keep what they hold, as outputs do; what could not travel is refused all the same."""
    comm = unicomm.new_comm("fake", "cpu", rank=1, size=4)
    held = [1, 2, 3, 4]
    objcol.all_gather_object(comm, held, "x")
    objcol.gather_object(comm, "x", held, root=1)
    objcol.broadcast_object_list(comm, held, root=0)
    objcol.scatter_object_list(comm, held, root=2)
    objcol.send_object_list(comm, held, 0)
    objcol.recv_object_list(comm, held, 0)
    assert held == [1, 2, 3, 4]
    with pytest.raises(InvalidArgumentError, match="cannot travel safely"):
        objcol.all_gather_object(comm, held, lambda: 1)


def test_wrong_handles(raised):
    def program(comm: Communicator) -> None:
        out = torch.zeros(2)
        for use in (lambda h: comm.all_gather_p_exec(h, torch.ones(2), False), comm.all_gather_p_free):
            error = raised(use, "handle")
            assert type(error) is InvalidArgumentError
            assert error.op in ("all_gather_p_exec", "all_gather_p_free")
            assert error.message == "handle is a str"
        handle = comm.all_gather_p_init(out, timeout=5)
        assert handle.timeout == 5
        comm.all_gather_p_exec(handle, torch.full((2,), 7.0), True).wait()
        assert out.tolist() == [7.0, 7.0]
        comm.all_gather_p_free(handle)
        assert type(raised(comm.all_gather_p_free, handle)) is NotReadyError
        for bad in (torch.zeros(2, 2).t(), None, torch.zeros(2, device="meta")):
            assert raised(comm.all_gather_p_init, bad).op == "all_gather_single"

    run_ranks(program, 1)


def test_wrong_objects(raised):
    """Found before anything is sent, on the rank that passes them."""

    def program(comm: Communicator) -> None:
        n, me = comm.get_size(), comm.get_rank()
        lists = [None] * n
        wrong = {
            "all_gather": lambda codec, obj: objcol.all_gather_object(comm, lists, obj, codec),
            "gather": lambda codec, obj: objcol.gather_object(comm, obj, lists, me, codec),
            "broadcast": lambda codec, obj: objcol.broadcast_object_list(comm, [obj], me, codec),
            "scatter": lambda codec, obj: objcol.scatter_object_list(comm, [None], [obj] * n, me, codec),
            "send": lambda codec, obj: objcol.send_object_list(comm, [obj], 1 - me, codec),
        }
        if me == 0:
            for op, use in wrong.items():
                for codec, obj in (("json", 1), (None, 1), ("safe", ReduceOp.SUM), ("pickle", lambda: 1)):
                    error = raised(use, codec, obj)
                    assert type(error) is InvalidArgumentError, repr(error)
                    assert (error.op, error.comm, error.rank) == (op, "ranks", 0)
                    assert "is unknown" in error.message or "cannot travel" in error.message
            assert "is unknown" in str(raised(objcol.recv_object_list, comm, [None], 1, "json"))
            for root in (-1, 2, "0"):
                assert raised(objcol.gather_object, comm, 1, lists, root).op == "gather"
            assert "output_list is empty" in str(raised(objcol.scatter_object_list, comm, []))
        assert check_sum(comm).seq == 1
        error = None
        held = [0] * (2 if me == 0 else 3)
        if me == 0:
            objcol.broadcast_object_list(comm, held)
        else:
            error = raised(objcol.broadcast_object_list, comm, held)
            assert "object_list has 3 entries, the root's 2" in str(error)
        check_sum(comm)

    run_ranks(program, 2)


# --- errors -------------------------------------------------------------------------------------------------


def test_the_tree():
    classes = [
        c for c in vars(unicomm.comms.errors).values() if inspect.isclass(c) and issubclass(c, CommError)
    ]
    assert len(classes) == 11
    assert issubclass(CommError, RuntimeError)
    assert issubclass(InvalidArgumentError, ValueError)
    assert all(c.__name__ in unicomm.__all__ for c in classes)
    assert issubclass(DeadlockError, CommTimeoutError)
    assert all(c.__bases__[0] is CommError for c in classes if c not in (CommError, DeadlockError))


def test_what_an_error_says():
    error = MismatchError("they differ", op="all_reduce", comm="c", seq=7, rank=1, culprits=[2], hint="look")
    assert str(error) == "[all_reduce #7, communicator 'c', rank 1] they differ\n  -> look"
    assert str(CommError("plain")) == "plain"
    assert str(CommError("x", rank=0)) == "[rank 0] x"
    assert CommError("x").culprits == ()


def test_errors_travel_between_processes():
    error = PeerLostError("gone", op="recv", comm="c", seq=3, rank=1, culprits=(2, 3), hint="look there")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is PeerLostError
    assert (str(copy), vars(copy)) == (str(error), vars(error))
    assert type(pickle.loads(pickle.dumps(CommTimeoutError("x")))) is CommTimeoutError


def test_reduce_ops_as_values(raised):
    premul = ReduceOp.PREMUL_SUM(torch.tensor(0.5, dtype=torch.float64))
    for op in (SUM, ReduceOp.AVG, premul):
        assert pickle.loads(pickle.dumps(op)) == op
        assert hash(pickle.loads(pickle.dumps(op))) == hash(op)
    assert premul == ReduceOp.PREMUL_SUM(0.5) != ReduceOp.PREMUL_SUM(2)
    assert (premul.name, repr(premul), repr(SUM)) == (
        "PREMUL_SUM",
        "ReduceOp.PREMUL_SUM(0.5)",
        "ReduceOp.SUM",
    )
    assert ReduceOp(unicomm.RedOpType.SUM) == ReduceOp(1) == SUM != "SUM"
    factors = (torch.ones(2), torch.tensor(1j), "2", None, True, 10**400, 2**53 + 1)
    wrong = [lambda f=f: ReduceOp.PREMUL_SUM(f) for f in factors]
    wrong += [lambda: ReduceOp(unicomm.RedOpType.PREMUL_SUM), lambda: ReduceOp(unicomm.RedOpType.SUM, 2.0)]
    wrong += [lambda: ReduceOp(99), lambda: ReduceOp("SUM"), lambda: ReduceOp(None)]
    for make in wrong:
        error = raised(make)
        assert type(error) is InvalidArgumentError, repr(error)
        assert error.hint


def test_a_copy_is_the_same_member():
    """A model that holds a communicator can be copied; it cannot be sent to another process."""
    with unicomm.new_comm("shm", torch.device("cpu")) as comm:
        module = torch.nn.Linear(2, 2)
        module.comm = comm
        assert copy.deepcopy(module).comm is copy.copy(comm) is comm
        with pytest.raises(TypeError, match="belongs to its process"):
            pickle.dumps(comm)


def test_records_name_the_user_not_torch():
    """Through torch.distributed too, a record's frame is the program's."""
    from unicomm.c10d.process_group import UnicommProcessGroup

    with unicomm.new_comm("shm", torch.device("cpu")) as comm:
        group = UnicommProcessGroup(comm)
        options = torch.distributed.AllreduceOptions()

        def through_torch() -> None:
            # A function that lies in torch's folder calls the group.
            code = compile("def call(group, x, o): group.allreduce([x], o)", torch.__file__, "exec")
            names: dict[str, Callable[..., object]] = {}
            exec(code, names)
            names["call"](group, torch.ones(2), options)

        through_torch()
        group.allreduce([torch.ones(2)], options)
        ring = recorded.ring()
        last = [ring.frame(record).function for record in ring.records[-2:]]
        assert last[0].endswith("through_torch")
        assert last[1].endswith("test_records_name_the_user_not_torch")
