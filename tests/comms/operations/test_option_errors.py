"""Wrong ranks, reductions, timeouts and hints: see bad_calls.py for what has to happen."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.comms.operations.bad_calls import BAD, NONE, SUM, Case, N, bad_calls, f, filled, several
from tests.comms.operations.test_argument_errors import CASES as TENSOR_CASES
from unicomm import P2POp, RedOpType, ReduceOp, UnsupportedError
from unicomm.comms.operations.table import OPERATIONS, Kind

CASES: list[Case] = []

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
    Case("set_hints", "no text", lambda c, a: c.set_hints({"persistent_store": 1}), "not text"),
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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shm(case, raised):
    bad_calls([case], "shm", raised)


@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_gloo(op, raised):
    bad_calls([case for case in CASES if case.op == op], "gloo", raised)


def test_fake(raised):
    bad_calls(CASES, "fake", raised)


def test_every_operation_is_tried():
    tried = {case.op for case in [*CASES, *TENSOR_CASES]}
    refused = {"new_window", "reconfigure", "abort"}  # take no arguments, or refuse all of them
    elsewhere = {name for name, row in OPERATIONS.items() if row.kind is Kind.SYMMETRIC}  # tests/symm
    assert set(OPERATIONS) - refused - elsewhere <= tried
