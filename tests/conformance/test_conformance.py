"""The conformance suite on the backends of this machine."""

import pytest

from unicomm.comms.execution.composed.completion import composed_operations
from unicomm.comms.operations.table import OPERATIONS, Kind
from unicomm.testing import conformance, run_ranks

WORLDS = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("operation", conformance.OPERATIONS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp", "ucx"])
def test_operation(backend, world, operation):
    if backend not in ("shm",) and world == 8:
        # Eight ranks of one process over TCP on two cores: the sizes that matter less are left out.
        counts = run_ranks(
            lambda comm: conformance.check(comm, operation, lambda case: case.count in (0, 17, 1000)),
            world,
            backend=backend,
        )
    else:
        counts = run_ranks(lambda comm: conformance.check(comm, operation), world, backend=backend)
    assert len(set(counts)) == 1
    assert counts[0] > 20


#: `auto` with Gloo between hosts, also where there is UCX.
GLOO = "auto with gloo"


def chosen(backend, hosts):
    """The backend, and the hints that place its ranks."""
    if backend == GLOO:
        return "auto", {"hosts": ",".join(hosts), "between": "gloo"}
    return backend, {"hosts": ",".join(hosts)} if backend == "auto" else {}


#: As (backend, hosts of the ranks): those of several hosts fold in each host, then between them.
PLACES = [
    *(("shm", "aa"), ("shm", "aaa"), ("shm", "aaaaaaaa"), ("gloo", "aa"), ("gloo", "aaaa")),
    *(("tcp", "aa"), ("tcp", "aaaa"), ("ucx", "aaaa")),
    *(("auto", "abcd"), ("auto", "aab"), ("auto", "aabb"), ("auto", "abab"), ("auto", "aaabbbcc")),
    *((GLOO, "abcd"), (GLOO, "aab"), (GLOO, "abab")),
]


@pytest.mark.parametrize("operation", conformance.REDUCTIONS)
@pytest.mark.parametrize(("backend", "hosts"), PLACES)
def test_narrow_floats_are_rounded_once(backend, hosts, operation):
    backend, hints = chosen(backend, hosts)
    counts = run_ranks(
        lambda comm: conformance.check_rounding(comm, operation), len(hosts), backend=backend, hints=hints
    )
    assert set(counts) == {32}


#: The options run on these; those of mpi in tests/backends/mpi.
WITH_OPTIONS = [("shm", "aaaa"), ("gloo", "abcd"), ("tcp", "abcd"), ("auto", "aabb"), ("auto", "aab")]
WITH_OPTIONS += [(GLOO, "aabb"), ("fake", "aa")]


@pytest.mark.parametrize("option", conformance.OPTIONS)
@pytest.mark.parametrize(("backend", "hosts"), WITH_OPTIONS)
def test_options(backend, hosts, option):
    backend, places = chosen(backend, hosts)
    counts = run_ranks(
        lambda comm: conformance.check_option(comm, option),
        len(hosts),
        backend=backend,
        hints={**conformance.OPTIONS[option].hints, **places},
    )
    assert len(set(counts)) == 1
    assert counts[0] > 9


@pytest.mark.parametrize("operation", conformance.OPERATIONS)
@pytest.mark.parametrize(
    ("backend", "hosts"), [("gloo", "aaa"), ("tcp", "aaa"), ("ucx", "aaa"), ("auto", "aabb")]
)
def test_operation_without_comparison(backend, hosts, operation):
    """As by default with more than 16 ranks. What ranks send to compare their calls may also carry data."""
    backend, hints = chosen(backend, hosts)
    hints["check_mismatch"] = "false"
    counts = run_ranks(
        lambda comm: conformance.check(comm, operation), len(hosts), backend=backend, hints=hints
    )
    assert len(set(counts)) == 1
    assert counts[0] > 20


@pytest.mark.parametrize("operation", conformance.OPERATIONS)
def test_operation_of_17_ranks(operation):
    counts = run_ranks(
        lambda comm: conformance.check(comm, operation, lambda case: case.count in (0, 17, 1000)),
        17,
        backend="tcp",
    )
    assert len(set(counts)) == 1
    assert counts[0] > 20


@pytest.mark.parametrize("operation", conformance.OPERATIONS)
def test_fake_takes_every_call(operation):
    counts = run_ranks(lambda comm: conformance.check(comm, operation), 3, backend="fake")
    assert counts[0] > 20


def test_a_wrong_backend_is_caught():
    """The suite itself: a backend that swaps two elements must not pass."""
    from unicomm.backends.shm import ShmBackend

    class Swapping(ShmBackend):
        def run(self, call):
            super().run(call)
            if call.outputs and call.outputs[0].numel() > 16:
                flat = call.outputs[0].detach().reshape(-1)
                flat[[0, 1]] = flat[[1, 0]].clone()

    from unicomm import register_backend

    register_backend("swapping", Swapping)
    with pytest.raises(conformance.ConformanceError, match="broadcast"):
        run_ranks(lambda comm: conformance.check(comm, "broadcast"), 2, backend="swapping")


def test_every_collective_can_be_composed():
    assert composed_operations() == {n for n, row in OPERATIONS.items() if row.kind is Kind.COLLECTIVE}


@pytest.mark.parametrize("operation", [op for op in conformance.OPERATIONS if op not in ("send", "recv")])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_backend_with_nothing_but_exchange(operation, world):
    """Everything is composed for a backend that can only send and receive."""
    from unicomm import register_backend
    from unicomm.backends.registry import backend_names
    from unicomm.backends.shm import ShmBackend
    from unicomm.comms.backend import Capabilities

    class Minimal(ShmBackend):
        capabilities = Capabilities(
            device_types=frozenset({"cpu"}), bytes_only=True, hints=ShmBackend.capabilities.hints
        )

        def run(self, call):
            raise AssertionError(f"{call.name} should have been composed")

    if "minimal" not in backend_names():
        register_backend("minimal", Minimal)
    counts = run_ranks(lambda comm: conformance.check(comm, operation), world, backend="minimal")
    assert counts[0] > 20
