"""Wrong arguments: an error on the rank that made the call, nothing recorded or sent, and everything works on.

One rank makes the bad call, synchronously and asynchronously, while the others do nothing. Had anything been
sent or numbered, the good calls that all ranks make then would disagree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

from unicomm import Communicator, InvalidArgumentError, P2POp, RedOpType, ReduceOp, UnsupportedError
from unicomm.comms.ops import OPERATIONS
from unicomm.testing import run_ranks

N, BAD = 3, 1  # ranks, and the one that is wrong
SUM = ReduceOp.SUM
NONE: list[torch.Tensor] = []


@dataclass
class Case:
    op: str
    what: str
    call: Callable[[Communicator, bool], object]
    says: str
    error: type[Exception] = InvalidArgumentError

    def __str__(self) -> str:
        return f"{self.op}-{self.what}".replace(" ", "_")


def f(n: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(n, dtype=dtype)


def several(n: int = 6, count: int = N, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [f(n, dtype) for _ in range(count)]


def freed() -> torch.Tensor:
    tensor = f()
    tensor.untyped_storage().resize_(0)
    return tensor


def fake_tensor() -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return f()


def filled(comm: Communicator, *entries: P2POp) -> Callable[[bool], object]:
    batch = comm.batch_op_create()
    batch.ops.extend(entries)
    return batch.issue


def twice(comm: Communicator, a: bool) -> object:
    t = f()
    return filled(comm, P2POp("recv", t, 0), P2POp("recv", t, 2))(a)


def in_place_ring(comm: Communicator, a: bool) -> object:
    t = f()
    return filled(comm, P2POp("send", t, 2), P2POp("recv", t[2:], 0))(a)


room = f(30)
windows = [room[0:6], room[4:10], room[12:18]]
whole = torch.zeros(3 * N)

# What is wrong with a tensor, tried with an operation of each kind.
TENSORS: list[tuple[str, Callable[[], object], str]] = [
    ("meta", lambda: torch.zeros(6, device="meta"), "on meta, the communicator on cpu"),
    ("transposed", lambda: torch.zeros(3, 2).t(), r"not contiguous \(shape \(2, 3\), strides \(1, 2\)\)"),
    ("strided", lambda: torch.zeros(12)[::2], "not contiguous"),
    ("expanded", lambda: torch.zeros(1).expand(6), "not contiguous"),
    ("sparse", lambda: f().to_sparse(), "sparse"),
    ("csr", lambda: torch.eye(2).to_sparse_csr(), "sparse"),
    ("conjugate", lambda: f(6, torch.complex64).conj(), "lazy conjugate"),
    ("negation", lambda: torch.tensor([1j, 2j])[:1].conj().imag, "lazy negation"),
    ("freed", freed, "has no memory"),
    ("zero tensor", lambda: torch._efficientzerotensor(6), "has no memory"),
    ("FakeTensor", fake_tensor, r"has no memory \(FakeTensor"),
    ("None", lambda: None, "NoneType, not a tensor"),
    ("numpy", lambda: np.zeros(6, dtype=np.float32), "ndarray, not a tensor"),
    ("number", lambda: 3.0, "float, not a tensor"),
]
WITH_TENSOR: list[tuple[str, str, Callable[[Communicator, object, bool], object]]] = [
    ("all_reduce", "tensor", lambda c, t, a: c.all_reduce(t, SUM, a)),
    ("broadcast", "tensor", lambda c, t, a: c.broadcast(t, 0, a)),
    ("all_gather_single", "input", lambda c, t, a: c.all_gather_single(f(18), t, a)),
    ("all_gather", r"tensor_list\[2\]", lambda c, t, a: c.all_gather([f(), f(), t], f(), a)),
    ("reduce_scatter_single", "output", lambda c, t, a: c.reduce_scatter_single(t, f(18), SUM, a)),
    ("all_to_all", r"input_tensor_list\[0\]", lambda c, t, a: c.all_to_all(several(), [t, f(), f()], a)),
    ("send", "tensor", lambda c, t, a: c.send(t, 0, a)),
    ("recv", "tensor", lambda c, t, a: filled(c, P2POp("recv", t, 0))(a)),
]
CASES = [
    Case(
        op, what, lambda c, a, call=call, make=make: call(c, make(), a), f"{name} is .*{says}|{name} .*{says}"
    )
    for op, name, call in WITH_TENSOR
    for what, make, says in TENSORS
]

# Ranks.
for _value, _says in [
    (N, f"must be in range \\[0, {N}\\), but got {N}"),
    (-1, "range"),
    (1.5, "no rank"),
    (None, "no rank"),
]:
    CASES += [
        Case("broadcast", f"root {_value}", lambda c, a, v=_value: c.broadcast(f(), v, a), "root.*" + _says),
        Case("reduce", f"root {_value}", lambda c, a, v=_value: c.reduce(f(), v, SUM, a), "root.*" + _says),
        Case(
            "scatter", f"root {_value}", lambda c, a, v=_value: c.scatter(f(), NONE, v, a), "root.*" + _says
        ),
        Case("gather", f"root {_value}", lambda c, a, v=_value: c.gather(NONE, f(), v, a), "root.*" + _says),
        Case(
            "gather_single", f"root {_value}", lambda c, a, v=_value: c.gather_single(None, f(), v, a), "root"
        ),
        Case("send", f"dst {_value}", lambda c, a, v=_value: c.send(f(), v, a), "dst.*" + _says),
        Case("recv", f"src {_value}", lambda c, a, v=_value: c.recv(f(), v, a), "src.*" + _says),
    ]
CASES += [
    Case("send", "to oneself", lambda c, a: c.send(f(), BAD, a), "cannot send to or from oneself"),
    Case("recv", "from oneself", lambda c, a: c.recv(f(), BAD, a), "cannot recv to or from oneself"),
    Case(
        "send",
        "to oneself in a batch",
        lambda c, a: filled(c, P2POp("send", f(), 0), P2POp("send", f(), BAD))(a),
        "oneself",
    ),
    Case("batch", "empty", lambda c, a: filled(c)(a), "empty batch"),
    Case(
        "batch", "of unknown kind", lambda c, a: filled(c, P2POp("put", f(), 0))(a), "kind='put' is unknown"
    ),
    Case(
        "batch",
        "of a collective",
        lambda c, a: filled(c, P2POp("barrier", f(), 0))(a),
        "kind='barrier' is unknown",
    ),
    Case("batch", "receiving twice into one tensor", twice, "output tensors 0 and 1 share memory"),
    Case("batch", "receiving into what it sends", in_place_ring, "input and output share memory"),
]

# Lists, sizes and types.
CASES += [
    Case(
        "all_gather",
        "short list",
        lambda c, a: c.all_gather(several(count=2), f(), a),
        "2 tensors, the communicator 3 ranks",
    ),
    Case("all_gather", "long list", lambda c, a: c.all_gather(several(count=4), f(), a), "4 tensors"),
    Case("all_gather", "no list", lambda c, a: c.all_gather(f(18), f(), a), "tensor_list is a Tensor"),
    Case(
        "all_gather",
        "uneven",
        lambda c, a: c.all_gather([f(), f(5), f()], f(), a),
        r"tensor_list\[1\] has 5 elements",
    ),
    Case(
        "all_gather",
        "dtypes",
        lambda c, a: c.all_gather([f(), f(), f(6, torch.int32)], f(), a),
        r"tensor is|\[2\] is torch.int32",
    ),
    Case("all_gather_v", "short list", lambda c, a: c.all_gather_v(several(count=1), f(), a), "1 tensors"),
    Case(
        "all_gather_v",
        "own size",
        lambda c, a: c.all_gather_v([f(1), f(2), f(6)], f(6), a),
        "this rank's own",
    ),
    Case(
        "all_gather_single",
        "small output",
        lambda c, a: c.all_gather_single(f(17), f(), a),
        "output has 17 elements, but 18",
    ),
    Case(
        "all_gather_single",
        "dtypes",
        lambda c, a: c.all_gather_single(f(18), f(6, torch.int32), a),
        "input is torch.int32",
    ),
    Case(
        "reduce_scatter",
        "short list",
        lambda c, a: c.reduce_scatter(f(), several(count=2), SUM, a),
        "2 tensors",
    ),
    Case(
        "reduce_scatter",
        "uneven",
        lambda c, a: c.reduce_scatter(f(), [f(), f(), f(7)], SUM, a),
        r"input_list\[2\] has 7",
    ),
    Case(
        "reduce_scatter_v",
        "own size",
        lambda c, a: c.reduce_scatter_v(f(), [f(), f(1), f()], SUM, a),
        "this rank's own",
    ),
    Case(
        "reduce_scatter_single",
        "small input",
        lambda c, a: c.reduce_scatter_single(f(), f(6), SUM, a),
        "6 elements, but 18",
    ),
    Case(
        "all_to_all_single",
        "indivisible",
        lambda c, a: c.all_to_all_single(f(7), f(7), a),
        "cannot share equally",
    ),
    Case(
        "all_to_all_single",
        "sizes",
        lambda c, a: c.all_to_all_single(f(6), f(9), a),
        "input has 9 elements, but 6",
    ),
    Case(
        "all_to_all",
        "short list",
        lambda c, a: c.all_to_all(several(), several(count=2), a),
        "input_tensor_list has 2",
    ),
    Case(
        "all_to_all",
        "dtypes",
        lambda c, a: c.all_to_all(several(), several(dtype=torch.int8), a),
        "torch.int8",
    ),
    Case(
        "all_to_all",
        "own part",
        lambda c, a: c.all_to_all(several(6), several(5), a),
        "sends 5 elements to itself, but expects 6",
    ),
    Case(
        "scatter",
        "short list at the root",
        lambda c, a: c.scatter(f(), several(count=2), BAD, a),
        "2 tensors",
    ),
    Case("scatter", "no list at the root", lambda c, a: c.scatter(f(), None, BAD, a), "NoneType"),
    Case(
        "scatter", "uneven at the root", lambda c, a: c.scatter(f(), several(5), BAD, a), "5 elements, but 6"
    ),
    Case(
        "scatter",
        "number where not the root",
        lambda c, a: c.scatter(f(), 5, 0, a),
        "input_tensor_list is a int",
    ),
    Case(
        "gather", "long list at the root", lambda c, a: c.gather(several(count=4), f(), BAD, a), "4 tensors"
    ),
    Case(
        "gather",
        "uneven at the root",
        lambda c, a: c.gather([f(), f(), f(1)], f(), BAD, a),
        r"\[2\] has 1 elements",
    ),
    Case(
        "gather_single",
        "None at the root",
        lambda c, a: c.gather_single(None, f(), BAD, a),
        "NoneType, not a tensor",
    ),
    Case(
        "gather_single",
        "small output at the root",
        lambda c, a: c.gather_single(f(6), f(), BAD, a),
        "6 elements, but 18",
    ),
]


# Splits.
def v(
    o: object, i: object, out: torch.Tensor | None = None, inp: torch.Tensor | None = None
) -> Callable[..., object]:
    def call(c: Communicator, a: bool) -> object:
        return c.all_to_all_v_single(f() if out is None else out, f() if inp is None else inp, o, i, a)

    return call


V = "all_to_all_v_single"
CASES += [
    Case(V, "too few", v([2, 4], [2, 2, 2]), "output_split_sizes has 2 entries"),
    Case(V, "too many", v([2, 2, 2], [2, 2, 1, 1]), "input_split_sizes has 4 entries"),
    Case(V, "negative", v([-1, 2, 5], [2, 2, 2]), "negative size -1"),
    Case(V, "overlong", v([2, 2, 3], [2, 2, 2]), "adds up to 7, but output has 6 rows"),
    Case(V, "short", v([2, 2, 2], [2, 2, 1]), "adds up to 5, but input has 6 rows"),
    Case(V, "fractions", v([2, 2, 2], [1.5, 2, 2.5]), "no list of whole numbers"),
    Case(V, "text", v("222", [2, 2, 2]), "no list of whole numbers"),
    Case(V, "a number", v([2, 2, 2], 2), "input_split_sizes=2 is no list"),
    Case(V, "none where rows do not divide", v([], [], f(7), f(6)), "7 rows, which 3 ranks cannot share"),
    Case(V, "own part", v([2, 1, 3], [2, 2, 2]), "sends 2 rows to itself, but expects 1"),
    Case(
        V,
        "row sizes",
        v([2, 2, 2], [2, 2, 2], torch.zeros(6, 2), torch.zeros(6, 3)),
        "row of output has 2 elements, of input 3",
    ),
    Case(
        V,
        "row sizes of a scalar",
        v([0, 1, 0], [0, 1, 0], torch.zeros(1, 5), torch.tensor(1.0)),
        "row of output has 5 elements, of input 1",
    ),
    Case(
        V,
        "dtypes",
        v([2, 2, 2], [2, 2, 2], f(6, torch.int64)),
        "torch.float32, the other tensors torch.int64",
    ),
    Case(V, "in place", v([2, 2, 2], [2, 2, 2], room[:6], room[:6]), "share memory"),
]

# Memory that two arguments share.
CASES += [
    Case(
        "all_gather",
        "repeated output",
        lambda c, a: c.all_gather([f()] * N, f(), a),
        "output tensors 0 and 1 share memory",
    ),
    Case("all_gather", "overlapping outputs", lambda c, a: c.all_gather(windows, f(), a), "share memory"),
    Case(
        "all_gather_v",
        "repeated output of an empty input",
        lambda c, a: c.all_gather_v([room[:2], f(0), room[1:4]], f(0), a),
        "share memory",
    ),
    Case(
        "all_gather",
        "other part as input",
        lambda c, a: (lambda o: c.all_gather(o, o[0], a))(several()),
        "input and output share memory",
    ),
    Case(
        "all_gather_single",
        "other part as input",
        lambda c, a: c.all_gather_single(whole, whole[:3], a),
        "share memory",
    ),
    Case(
        "all_gather_single",
        "shifted part as input",
        lambda c, a: c.all_gather_single(whole, whole[2:5], a),
        "share memory",
    ),
    Case(
        "reduce_scatter_single",
        "other part as output",
        lambda c, a: c.reduce_scatter_single(whole[6:], whole, SUM, a),
        "share memory",
    ),
    Case(
        "reduce_scatter",
        "other part as output",
        lambda c, a: (lambda i: c.reduce_scatter(i[2], i, SUM, a))(several()),
        "share memory",
    ),
    Case(
        "reduce_scatter",
        "own part within another",
        lambda c, a: c.reduce_scatter(room[6:12], [room[3:9], room[6:12], f()], SUM, a),
        "share memory",
    ),
    Case(
        "all_to_all_single",
        "in place",
        lambda c, a: (lambda t: c.all_to_all_single(t, t, a))(f()),
        "share memory",
    ),
    Case("all_to_all", "in place", lambda c, a: (lambda t: c.all_to_all(t, t, a))(several()), "share memory"),
    Case(
        "gather", "repeated output at the root", lambda c, a: c.gather([f()] * N, f(), BAD, a), "share memory"
    ),
    Case(
        "gather_single",
        "other part at the root",
        lambda c, a: c.gather_single(whole, whole[:3], BAD, a),
        "share memory",
    ),
    Case(
        "scatter",
        "other part at the root",
        lambda c, a: (lambda i: c.scatter(i[0], i, BAD, a))(several()),
        "share memory",
    ),
]

# Reductions.
REDUCTIONS = [
    ("BAND of floats", torch.float32, ReduceOp.BAND, "defined for integers and bool, not for float32"),
    ("BXOR of complex", torch.complex64, ReduceOp.BXOR, "not for complex64"),
    ("MIN of complex", torch.complex128, ReduceOp.MIN, "needs an order"),
    ("AVG of bool", torch.bool, ReduceOp.AVG, "arithmetic, which bool lacks"),
    ("PREMUL_SUM of bool", torch.bool, ReduceOp.PREMUL_SUM(2), "arithmetic"),
    ("fraction of integers", torch.int32, ReduceOp.PREMUL_SUM(0.5), "0.5 of PREMUL_SUM is no integer"),
    ("NaN of integers", torch.int32, ReduceOp.PREMUL_SUM(float("nan")), "is no integer"),
    ("SUM of complex32", torch.complex32, SUM, "can be moved but not reduced"),
    ("RedOpType", torch.float32, RedOpType.SUM, "op is a RedOpType"),
    ("torch's ReduceOp", torch.float32, dist.ReduceOp.SUM, "op is a RedOpType"),
    ("text", torch.float32, "sum", "op is a str"),
    ("None", torch.float32, None, "op is a NoneType"),
]
CASES += [
    Case(op, what, lambda c, a, d=dtype, r=red, call=call: call(c, d, r, a), says)
    for what, dtype, red, says in REDUCTIONS
    for op, call in {
        "all_reduce": lambda c, d, r, a: c.all_reduce(f(6, d), r, a),
        "reduce": lambda c, d, r, a: c.reduce(f(6, d), 0, r, a),
        "reduce_scatter_single": lambda c, d, r, a: c.reduce_scatter_single(f(6, d), f(18, d), r, a),
        "reduce_scatter": lambda c, d, r, a: c.reduce_scatter(f(6, d), several(dtype=d), r, a),
    }.items()
]

# Timeouts and hints.
for _bad in (-1, float("nan"), "5", True):
    CASES += [
        Case(
            "all_reduce",
            f"timeout {_bad}",
            lambda c, a, t=_bad: c.all_reduce(f(), SUM, a, timeout=t),
            "no duration",
        ),
        Case("recv", f"timeout {_bad}", lambda c, a, t=_bad: c.recv(f(), 0, a, timeout=t), "no duration"),
        Case("set_timeout", f"{_bad}", lambda c, a, t=_bad: c.set_timeout(t), "no duration"),
        Case("finalize", f"timeout {_bad}", lambda c, a, t=_bad: c.finalize(t), "no duration"),
        Case("split", f"timeout {_bad}", lambda c, a, t=_bad: c.split([BAD], timeout=t), "no duration"),
        Case(
            "all_gather_single",
            f"init timeout {_bad}",
            lambda c, a, t=_bad: c.all_gather_p_init(f(), timeout=t),
            "no duration",
        ),
    ]
HINTED = {"some": "hint"}
CASES += [
    Case(
        op,
        f"hints {hints}",
        lambda c, a, h=hints, call=call: call(c, a, h),
        "no hints for one operation",
        UnsupportedError,
    )
    for hints in (HINTED, 5)
    for op, call in {
        "all_reduce": lambda c, a, h: c.all_reduce(f(), SUM, a, hints=h),
        "barrier": lambda c, a, h: c.barrier(a, hints=h),
        "send": lambda c, a, h: c.send(f(), 0, a, hints=h),
        "batch": lambda c, a, h: c.batch_op_create().send(f(), 0).issue(a, hints=h),
        "all_gather_single": lambda c, a, h: c.all_gather_p_init(f(), hints=h),
    }.items()
]
CASES += [
    Case("set_hints", "unknown", lambda c, a: c.set_hints({"persistent_stores": "1"}), "knows no hint"),
    Case("set_hints", "no mapping", lambda c, a: c.set_hints("abc"), "no mapping"),
    Case("set_hints", "no text", lambda c, a: c.set_hints({"persistent_store": True}), "not text"),
    Case(
        "set_hints",
        "unreadable",
        lambda c, a: c.set_hints({"persistent_store": "perhaps"}),
        "unreadable value",
    ),
    Case(
        "set_hints",
        "later",
        lambda c, a: c.set_hints({"persistent_store": "1"}),
        "at creation only: persistent_store$",
        UnsupportedError,
    ),
    Case("split", "unknown hint", lambda c, a: c.split([BAD], hints=HINTED), "knows no hint 'some'"),
    Case("split", "hints no mapping", lambda c, a: c.split([BAD], hints=[1]), "no mapping"),
    Case("split", "rank beyond", lambda c, a: c.split([BAD, N]), "no list of ranks"),
    Case("split", "negative rank", lambda c, a: c.split([BAD, -1]), "no list of ranks"),
    Case("split", "mask", lambda c, a: c.split([True, True, False]), "no list of ranks"),
    Case("split", "None", lambda c, a: c.split(None), "ranks=None is no list"),
    Case("split", "a number", lambda c, a: c.split(2), "ranks=2 is no list"),
    Case("split", "text", lambda c, a: c.split("012"), "no list of ranks"),
    Case("split", "twice", lambda c, a: c.split([BAD, 0, BAD]), "hold one twice"),
    Case("split", "without oneself", lambda c, a: c.split([0, 2]), "do not include this one"),
]
# The fake backend moves nothing, so memory is not its business.
MEMORYLESS = {"freed", "zero tensor", "FakeTensor"}


def bad_calls(cases: list[Case], backend: str, raised: Callable[..., BaseException]) -> None:
    meeting = threading.Barrier(N, timeout=30)

    def program(comm: Communicator) -> None:
        recorder = comm._member.recorder
        for number, case in enumerate(cases, 1):
            meeting.wait()
            if comm.get_rank() == BAD:
                before = recorder.total()
                for async_op in (False, True):
                    error = raised(case.call, comm, async_op)
                    assert type(error) is case.error, (str(case), repr(error))
                    assert (error.op, error.comm, error.rank, error.seq) == (case.op, "ranks", BAD, None), (
                        str(case)
                    )
                    assert error.hint, str(case)
                    import re

                    assert re.search(case.says, error.message), (str(case), error.message)
                    assert f"[{case.op}, communicator 'ranks', rank {BAD}] " in str(error)
                assert recorder.total() == before, str(case)
            meeting.wait()
            x = torch.ones(6)
            assert comm.all_reduce(x, SUM, False).seq == number, str(case)
            if comm.get_rank() != 2:
                message = torch.tensor([7.0 * (1 - comm.get_rank())])
                move = comm.send if comm.get_rank() == 0 else comm.recv
                assert move(message, 1 - comm.get_rank(), False).seq == number, str(case)
                assert backend == "fake" or message.item() == 7.0, str(case)
            assert backend == "fake" or x.tolist() == [3.0] * 6, str(case)

    run_ranks(program, N, backend=backend)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shm(case, raised):
    bad_calls([case], "shm", raised)


@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_gloo(op, raised):
    bad_calls([case for case in CASES if case.op == op], "gloo", raised)


def test_fake(raised):
    bad_calls([case for case in CASES if case.what not in MEMORYLESS], "fake", raised)


def test_every_operation_is_tried():
    tried = {case.op for case in CASES}
    refused = {"new_window", "reconfigure", "finalize", "abort"}  # take no arguments, or refuse all of them
    assert set(OPERATIONS) - refused <= tried
