"""Faults as data: the error of each kind, ranks in other numbers, and the way to another rank and back."""

import json

import pytest
import torch

from unicomm import (
    AbortedError,
    BackendError,
    CommTimeoutError,
    DeadlockError,
    MismatchError,
    PeerLostError,
    UnsupportedError,
)
from unicomm._core import FaultCode
from unicomm.comms.failures import faults
from unicomm.comms.failures.faults import FINALIZED, SIZES, Claim, Fault, error_of, renumbered
from unicomm.comms.operations.dtypes import code_of
from unicomm.comms.operations.table import OPERATIONS

RECV, REDUCE = OPERATIONS["recv"].code, OPERATIONS["all_reduce"].code
FAULTS = [
    (
        Fault(FaultCode.TIMEOUT, absent=(1,), late=(0,), where={1: "is at a.py:3 in f"}, timeout=5),
        CommTimeoutError,
        "timed out after 5 s: ranks 0, 1 had not arrived; rank 1 is at a.py:3 in f",
        "timed out after 5 s: ranks 10, 11 had not arrived; rank 11 is at a.py:3 in f",
    ),
    (
        Fault(FaultCode.TIMEOUT, by=2, culprits=(1,)),
        CommTimeoutError,
        "timed out when rank 2 gave up: rank 1 had not arrived",
        "timed out when rank 12 gave up: rank 11 had not arrived",
    ),
    (
        Fault(
            FaultCode.DEADLOCK,
            culprits=(0, 1),
            claims=(
                Claim(0, RECV, root=1, amount=1, comm="a", line="x.py:1"),
                Claim(1, RECV, root=0, amount=7, comm="b", line="x.py:2"),
            ),
        ),
        DeadlockError,
        "these ranks wait for each other forever: rank 0 of 'a' in recv #1 from rank 1 (x.py:1),"
        " rank 1 of 'b' in recv #7 from rank 0 (x.py:2)",
        "these ranks wait for each other forever: rank 10 of 'a' in recv #1 from rank 11 (x.py:1),"
        " rank 1 of 'b' in recv #7 from rank 0 (x.py:2)",
    ),
    (
        Fault(FaultCode.DEADLOCK, culprits=(1, 0)),
        DeadlockError,
        "ranks 0, 1 wait for each other forever",
        "ranks 10, 11 wait for each other forever",
    ),
    (
        Fault(FaultCode.PEER_LOST, dead=(2,)),
        PeerLostError,
        "rank 2 is gone (its process ended)",
        "rank 12 is gone (its process ended)",
    ),
    (
        Fault(FaultCode.PEER_LOST, dead=(0, 2), detail=FINALIZED),
        PeerLostError,
        "ranks 0, 2 have finalized this communicator",
        "ranks 10, 12 have finalized this communicator",
    ),
    (
        Fault(
            FaultCode.MISMATCH,
            culprits=(1,),
            claims=(Claim(0, REDUCE, code_of(torch.float64), 1, amount=4),),
        ),
        MismatchError,
        "the ranks called different things; rank 0: all_reduce(float64[4], SUM)",
        "the ranks called different things; rank 10: all_reduce(float64[4], SUM)",
    ),
    (
        Fault(
            FaultCode.MISMATCH,
            culprits=(0, 2),
            claims=(Claim(2, root=0, amount=24, extra=16),),
            detail=SIZES,
        ),
        MismatchError,
        "rank 2 expects 24 bytes from rank 0, which sends 16",
        "rank 12 expects 24 bytes from rank 10, which sends 16",
    ),
    (
        Fault(FaultCode.ABORTED, culprits=(1,)),
        AbortedError,
        "rank 1 aborted the communicator",
        "rank 11 aborted the communicator",
    ),
    (
        Fault(FaultCode.INTERNAL, by=1, detail="rank 3 of 4"),  # the words of a library stay
        BackendError,
        "shm: on rank 1: rank 3 of 4",
        "shm: on rank 11: rank 3 of 4",
    ),
    (Fault(FaultCode.UNSUPPORTED, detail="no", library="X"), UnsupportedError, "X: no", "X: no"),
]


@pytest.mark.parametrize(("fault", "kind", "text", "elsewhere"), FAULTS)
def test_the_error_and_its_ranks(fault, kind, text, elsewhere):
    error = error_of(fault)
    assert type(error) is kind
    assert error.message == text
    assert error.hint
    assert error.culprits == tuple(sorted(error.culprits))
    other = faults.renumber_error(error, [10, 11, 12])
    assert type(other) is kind
    assert other.message == elsewhere
    assert other.culprits == tuple(10 + r for r in error.culprits)
    for known in ("dead", "absent", "late"):
        assert getattr(other, known) == tuple(10 + r for r in getattr(error, known))


@pytest.mark.parametrize("fault", [row[0] for row in FAULTS])
def test_the_way_to_another_rank(fault):
    sent = Fault(**{**fault.__dict__, "by": 3})
    fields = json.loads(json.dumps(faults.fault_to_dict(sent)))
    assert faults.fault_from_dict(fields, fault.library) == sent
    error = error_of(fault)
    told = faults.error_from_dict(json.loads(json.dumps(faults.error_to_dict(error))), 3)
    assert (type(told), told.message, told.hint) == (type(error), error.message, error.hint)
    assert (told.culprits, told.dead, told.late) == (error.culprits, error.dead, error.late)


def test_ranks_that_the_other_communicator_has_not():
    fault = renumbered(Fault(FaultCode.PEER_LOST, dead=(0, 7)), [4])
    assert fault.dead == (4,)


def test_codes_of_errors_in_the_ring():
    codes = [faults.code_of(error_of(row[0])) for row in FAULTS]
    assert codes == [1, 1, 6, 6, 2, 2, 3, 3, 4, 100, 100]
    assert faults.code_of(ValueError()) == 100


def test_who_is_in_the_minority():
    assert faults.minority(["a", "b", "a"]) == [1]
    assert faults.minority(["a", "b"]) == [0, 1]
    assert faults.minority(["a"]) == []
