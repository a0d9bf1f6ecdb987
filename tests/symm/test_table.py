"""The table of functions over shared memory, called directly: what no operation above it uses."""

import re
from functools import partial

import numpy as np
import pytest

from tests import ROOT
from tests.threads import results
from unicomm import _core, symm

CSRC = ROOT / "csrc"
KINTERNAL, KMISMATCH = 5, 3
T = 20.0


def run_pes(n, program, heap=1 << 20):
    """`program(domain, pe)` on n threads; the first error is raised here."""
    table = _core.symm_host()
    fault, uid = table.unique_id(n, heap)
    assert fault is None
    assert len(uid) == 128

    def main(pe):
        fault, domain = table.init(uid, pe, n, "pes", T)
        assert fault is None
        return program(domain, pe)

    return results([partial(main, pe) for pe in range(n)])


def allocate(domain, words):
    fault, address = domain.allocate(8 * words, 64, T)
    assert fault is None
    return address, _core.symm_bytes(domain, address, 8 * words).view(np.int64)


@pytest.mark.parametrize(
    ("name", "ours"),
    [("Capability", symm.Capability), ("SignalOp", symm.SignalOp), ("Compare", symm.Compare)],
)
def test_enums(name, ours):
    text = (CSRC / "symm" / "table.hpp").read_text()
    body = re.search(rf"enum class {name} [^{{]*{{(.*?)}};", text, re.DOTALL).group(1)
    pairs = {key.lower(): int(value) for key, value in re.findall(r"\bk(\w+) = (\d+)", body)}
    assert pairs == {member.name.replace("_", "").lower(): int(member) for member in ours}


def test_everything_is_there():
    assert _core.symm_host().capabilities == sum(symm.Capability)
    assert _core.symm_host().limited(3).capabilities == 3


def test_teams():
    """Strided teams have numbers, copies and barriers of their own."""

    def program(domain, pe):
        address, mine = allocate(domain, 4)
        mine[:] = pe
        assert domain.barrier(T, 0) is None
        fault, none = domain.team_split(0, 0, 0, T)  # nobody is in one
        assert (fault, none) == (None, None)
        fault, team = domain.team_split(pe % 2, 2, 2, T)  # 0 and 2; 1 and 3
        assert fault is None
        got = np.zeros(1, np.int64)
        assert team.get(got.ctypes.data, address, 8, 1, 0) is None  # the second of the team
        assert got[0] == pe % 2 + 2
        for _ in range(50):
            assert team.barrier(T, 0) is None
        assert team.allocate(8, 64, T)[0][0] == KINTERNAL
        fault, backwards = domain.team_split(3, -1, 4, T)
        assert fault is None
        assert backwards.put(address + 8, mine[:1].ctypes.data, 8, 0, 0) is None if pe == 1 else True
        assert backwards.barrier(T, 0) is None
        # Different ideas of a team: all hear of it, and the domain goes on.
        fault, none = domain.team_split(0, 1, 3 if pe == 2 else 4, T)
        assert fault[0] == KMISMATCH
        assert none is None
        assert domain.team_split(2, 1, 3, T)[0][0] == KMISMATCH  # beyond the last PE
        assert domain.barrier(T, 0) is None
        return mine.tolist()

    assert run_pes(4, program) == [[0] * 4, [1] * 4, [2] * 4, [3, 1, 3, 3]]


def test_signals_compare_in_all_ways():
    def program(domain, pe):
        address, words = allocate(domain, 8)
        words[:] = 5
        assert domain.barrier(T, 0) is None
        if pe == 1:
            source = np.array([11, 12], np.int64)
            assert (
                domain.put_signal(address + 8, source.ctypes.data, 16, address, 4, symm.SignalOp.ADD, 0, 0)
                is None
            )
            return domain  # and does not leave
        assert domain.wait_signal(address, symm.Compare.EQ, 9, 1, T, 0) is None
        assert words[:3].tolist() == [9, 11, 12]
        for compare, value in [("NE", 8), ("GT", 8), ("GE", 9), ("LT", 10), ("LE", 9)]:
            assert domain.wait_signal(address, symm.Compare[compare], value, 1, T, 0) is None
        assert domain.put_signal(0, 0, 0, address, 3, symm.SignalOp.SET, 0, 0) is None
        assert domain.fence(0) is None
        assert domain.quiet(0) is None
        fault = domain.wait_signal(address, symm.Compare.GT, 3, 1, 0.01, 0)
        return words[0], fault[0], fault[1]

    assert run_pes(2, program)[0] == (3, 1, [1])


def test_addresses_outside_of_the_heap():
    def program(domain, pe):
        address, words = allocate(domain, 4)
        foreign = np.zeros(4, np.int64)
        for fault in (
            domain.put(foreign.ctypes.data, words.ctypes.data, 8, 0, 0),
            domain.get(foreign.ctypes.data, address, 1 << 21, 0, 0),
            domain.get(foreign.ctypes.data, address, 8, 1, 0),
            domain.get(foreign.ctypes.data, address, 8, -1, 0),
            domain.ptr(address, 1 << 21, 0)[0],
            domain.fetch_add(foreign.ctypes.data, 1, 0, 0)[0],
            domain.free(address + 8, T),
        ):
            assert fault[0] == KINTERNAL
        return foreign.tolist()

    assert run_pes(1, program) == [[0] * 4]


def test_an_id_that_somebody_does_not_use():
    table = _core.symm_host()
    fault, uid = table.unique_id(2, 4096)
    assert fault is None
    fault, domain = table.init(uid, 0, 2, "alone", 0.01)
    assert domain is None
    assert fault[0] == 1
    assert fault[1] == [1]
    fault, domain = table.init(uid, 1, 2, "late", 0.01)  # the first has taken it back
    assert domain is None
    assert fault[0] == KINTERNAL
    assert table.init(bytes(128), 0, 1, "none", T)[0][0] == KINTERNAL
    with pytest.raises(ValueError, match="128 bytes"):
        table.init(b"short", 0, 1, "none", T)
    fault, uid = table.unique_id(1, 4096)
    assert table.discard_id(uid) is None


def test_many_allocations():
    """The same offsets on all PEs, whatever was freed between, and never two in one place."""

    def program(domain, pe):
        rng = np.random.default_rng(3)
        held, offsets = [], []
        base, _ = allocate(domain, 1)
        for step in range(200):
            if held and rng.random() < 0.45:
                address, words, value = held.pop(rng.integers(len(held)))
                assert (words == value).all()
                assert domain.free(address, T) is None
            else:
                address, words = allocate(domain, int(rng.integers(1, 1500)))
                words[:] = step * 10 + pe
                held.append((address, words, step * 10 + pe))
                offsets.append(address - base)
        assert all((words == value).all() for _, words, value in held)
        return offsets

    a, b = run_pes(2, program, heap=1 << 22)
    assert a == b
