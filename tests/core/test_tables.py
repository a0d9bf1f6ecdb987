"""Numbers that C++ and Python both write down are the same."""

import re
from pathlib import Path

from unicomm.comms import engine
from unicomm.comms.dtypes import DTYPES, OTHER
from unicomm.comms.ops import OPERATIONS, Kind
from unicomm.comms.reduction import RedOpType
from unicomm.flight_recorder import ring

CSRC = Path(__file__).parent.parent.parent / "csrc"


def enum(path, name):
    """Enumerators of a C++ enum, by name in lower case without the k and underscores."""
    body = re.search(rf"enum (?:class )?{name}\b[^{{]*{{(.*?)}};", (CSRC / path).read_text(), re.DOTALL)
    pairs = re.findall(r"\bk(\w+)\s*=\s*(\d+)", body.group(1))
    assert pairs
    return {key.lower(): int(value) for key, value in pairs}


def flat(name):
    return name.replace("_", "").lower()


def test_operations():
    rows = {flat(n): row.code for n, row in OPERATIONS.items() if row.kind is not Kind.CONTROL}
    assert enum("core/opcode.hpp", "OpCode") == rows


def test_operation_codes_are_unique():
    codes = [row.code for row in OPERATIONS.values()]
    assert len(set(codes)) == len(codes)


def test_dtypes():
    names = {"none": 0, "other": OTHER}
    for info in DTYPES.values():
        names[flat(info.name).removesuffix("fn")] = info.code
    assert enum("core/dtype.hpp", "DType") == names


def test_reductions():
    assert enum("reduce/reduce.hpp", "Red") == {"none": 0, **{flat(t.name): int(t) for t in RedOpType}}


def test_states_flags_and_errors():
    states = enum("recorder/ring.hpp", "State")
    assert {v: k for k, v in states.items()} == ring.STATES
    assert (states["completed"], states["failed"]) == (engine._COMPLETED, engine._FAILED)
    flags = enum("recorder/ring.hpp", "RecordFlags")
    assert flags == {"async": ring.ASYNC, "p2p": ring.P2P, "batch": ring.BATCH, "receive": ring.RECEIVE}
    assert tuple(flags.values()) == (engine._ASYNC, engine._P2P, engine._BATCH, engine._RECEIVE)
    faults = enum("core/error.hpp", "FaultCode")
    assert {cls.__name__: code for cls, code in engine._ERROR_CODES} == {
        "CommTimeoutError": faults["timeout"],
        "PeerLostError": faults["peerlost"],
        "MismatchError": faults["mismatch"],
        "AbortedError": faults["aborted"],
    }
    assert set(faults.values()) <= set(ring.ERRORS)
