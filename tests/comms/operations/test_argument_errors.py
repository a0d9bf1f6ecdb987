"""Wrong tensors, lists, sizes, splits and memory: see bad_calls.py for what has to happen."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.comms.operations.bad_calls import BAD, SUM, Case, N, bad_calls, f, filled, several
from unicomm import Communicator, P2POp


def freed() -> torch.Tensor:
    tensor = f()
    tensor.untyped_storage().resize_(0)
    return tensor


# Here, for a torch with CUDA may crash where a thread is the first to enter the mode (seen with 2.11).
with FakeTensorMode():
    FAKE = f()


def twice(comm: Communicator, a: bool) -> object:
    t = f()
    return filled(comm, P2POp("recv", t, 0), P2POp("recv", t, 2))(a)


def in_place_ring(comm: Communicator, a: bool) -> object:
    t = f()
    return filled(comm, P2POp("send", t, 2), P2POp("recv", t[2:], 0))(a)


room = f(30)
windows = [room[0:6], room[4:10], room[12:18]]
whole = torch.zeros(3 * N)
parts = several()

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
    ("FakeTensor", lambda: FAKE, r"has no memory \(FakeTensor"),
    ("None", lambda: None, "NoneType, not a tensor"),
    ("byte-swapped", lambda: np.zeros(6, dtype=">f4"), "of dtype >f4 and cannot be a tensor"),
    ("backwards", lambda: np.zeros(6, dtype=np.float32)[::-1], "runs backwards"),
    ("strided array", lambda: np.zeros(12, dtype=np.float32)[::2], "not contiguous"),
    ("numpy scalar", lambda: np.float32(1), "float32, not a tensor"),
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
    Case("batch", "receiving twice into one tensor", twice, "output tensors 0 and 1 share memory"),
    Case("batch", "receiving into what it sends", in_place_ring, "input and output share memory"),
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
        lambda c, a: c.all_gather(parts, parts[0], a),
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
        lambda c, a: c.reduce_scatter(parts[2], parts, SUM, a),
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
        lambda c, a: c.all_to_all_single(parts[0], parts[0], a),
        "share memory",
    ),
    Case("all_to_all", "in place", lambda c, a: c.all_to_all(parts, parts, a), "share memory"),
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
        lambda c, a: c.scatter(parts[0], parts, BAD, a),
        "share memory",
    ),
]

# The fake backend moves nothing, so memory is not its business.
MEMORYLESS = {"freed", "zero tensor", "FakeTensor"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shm(case, raised):
    bad_calls([case], "shm", raised)


@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_gloo(op, raised):
    bad_calls([case for case in CASES if case.op == op], "gloo", raised)


def test_fake(raised):
    bad_calls([case for case in CASES if case.what not in MEMORYLESS], "fake", raised)
