"""Numbers that C++ and Python both write down are the same."""

import re

import pytest
import torch

from tests import ROOT
from unicomm import _core
from unicomm.comms.operations import recording
from unicomm.comms.operations.dtypes import DTYPES, NAMES, OTHER
from unicomm.comms.operations.reduction import RedOpType, ReduceOp, ReproducibleOp, why_not
from unicomm.comms.operations.table import OPERATIONS, Kind
from unicomm.flight_recorder.ring import reader as ring

CSRC = ROOT / "csrc"


def enum(path, name):
    """Enumerators of a C++ enum, by name in lower case without the k and underscores."""
    body = re.search(rf"enum (?:class )?{name}\b[^{{]*{{(.*?)}};", (CSRC / path).read_text(), re.DOTALL)
    pairs = re.findall(r"\bk(\w+)\s*=\s*(\d+)", body.group(1))
    assert pairs
    return {key.lower(): int(value) for key, value in pairs}


def flat(name):
    return name.replace("_", "").lower()


def test_operations():
    rows = {flat(n): row.code for n, row in OPERATIONS.items() if row.kind in (Kind.COLLECTIVE, Kind.P2P)}
    assert enum("operations/opcode.hpp", "OpCode") == rows


def test_operation_codes_are_unique():
    codes = [row.code for row in OPERATIONS.values()]
    assert len(set(codes)) == len(codes)


def test_dtypes():
    names = {"none": 0, "other": OTHER}
    names |= {flat(name): code for code, name in NAMES.items() if code > OTHER}
    for info in DTYPES.values():
        names[flat(info.name).removesuffix("fn")] = info.code
    assert enum("operations/dtype.hpp", "DType") == names


def test_reductions():
    known = {flat(t.name): int(t) for t in (*RedOpType, *ReproducibleOp)}
    assert enum("operations/reduction.hpp", "Red") == {"none": 0, **known}


def constants(prefix, *names):
    return {flat(name): getattr(_core, f"{prefix}_{name}") for name in names}


def test_states_flags_and_errors():
    states = enum("recorder/ring.hpp", "State")
    assert states == constants("RECORD", "CREATED", "STARTED", "COMPLETED", "FAILED")
    assert {v: k for k, v in states.items()} == ring.STATES
    flags = enum("recorder/ring.hpp", "RecordFlags")
    names = ("ASYNC", "P2P", "BATCH", "RECEIVE", "CAPTURED", "REPLAYED", "REPLAY")
    names += ("INPUT_CHECKSUM", "OUTPUT_CHECKSUM", "COMPARED", "ENCODED", "FROM_ANY")
    assert flags == constants("RECORD", *names)
    assert flags == {flat(name): getattr(ring, name) for name in names}
    assert list(flags.values()) == [getattr(recording, name) for name in names]
    faults = enum("base/error.hpp", "FaultCode")
    assert faults == {code.name.replace("_", "").lower(): int(code) for code in _core.FaultCode}
    assert {*faults.values(), _core.RECORD_OTHER_ERROR} <= set(ring.ERRORS)


def test_states_of_communicators():
    states = enum("recorder/ring.hpp", "CommState")
    assert states == constants("COMM", "OPEN", "FINALIZED", "FAILED")
    assert list(states.values()) == list(ring.COMM_STATES)
    assert states["failed"] == recording.BROKEN
    assert ring.COMM_STATES[states["finalized"]] == "finalized"


@pytest.mark.parametrize("info", DTYPES.values(), ids=lambda info: info.name)
def test_elements_have_the_size_that_torch_says(info):
    """The number and the size with which the core reads a tensor, by what it makes of one."""
    ones = torch.ones(3).to(info.dtype)
    out = torch.zeros(3).to(info.dtype)
    assert _core.fold(out, [ones, ones], int(RedOpType.MAX if info.kind != "complex" else RedOpType.PRODUCT))
    assert out.to(torch.complex128).tolist() == [1, 1, 1]


def test_reductions_are_defined_where_the_core_has_them():
    for dtype, info in DTYPES.items():
        for red in RedOpType:
            op = ReduceOp.PREMUL_SUM(2) if red is RedOpType.PREMUL_SUM else ReduceOp(red)
            assert (why_not(op, dtype) is None) == _core.fold_defined(info.code, int(red)), (dtype, red)
