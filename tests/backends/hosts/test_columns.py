"""Collectives of hosts with as many ranks each: over TCP every column of ranks carries a part of large ones.

Small ones go by the columns as well, or by the leaders where ranks outnumber the cores.
"""

import random
import threading

import pytest
import torch

import unicomm
from tests.backends.hosts.between import use
from tests.instruction_sets import BEST, ISAS
from unicomm import _core
from unicomm.testing import conformance, run_ranks
from unicomm.testing.conformance import Case

LAYOUTS = ["a,a,b,b", "a,b,b,a", "a,b,c,a,b,c", "a,a,a,b,b,b"]
SLICE = 1 << 18  # bytes that a column carries at once between two hosts; half of it among three
SUM, AVG, MAX, PRODUCT = (getattr(unicomm.ReduceOp, name) for name in ("SUM", "AVG", "MAX", "PRODUCT"))
NARROW = (torch.bfloat16, torch.float16)
OPERATIONS = ("all_reduce", "reduce_scatter_single", "all_gather_single", "all_to_all_single", "broadcast")


@pytest.fixture(params=["columns", "leaders", "gloo"])
def run(request, monkeypatch):
    """`run(program, layout)` runs a program on ranks that are threads; the layout names the host of each.

    A test runs over TCP, once with small collectives by columns and once by leaders, and over Gloo, which has
    no columns.
    """
    use("gloo" if request.param == "gloo" else "tcp", monkeypatch)
    monkeypatch.setattr(_core, "usable_cores", lambda: 1 if request.param == "leaders" else 1000)
    made, make = [], _core.HostsFast

    def noted(*args):
        made.append(make(*args))
        return made[-1]

    monkeypatch.setattr(_core, "HostsFast", noted)

    def start(program, layout):
        size = layout.count(",") + 1
        results = run_ranks(program, size, backend="auto", hints={"hosts": layout})
        by_columns = [] if request.param == "gloo" else [request.param == "columns"] * size
        assert [native.by_columns for native in made] == by_columns
        return results

    return start


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_at_the_edges_of_slices(run, layout, operation):
    ways = [(torch.float32, SUM), (torch.int8, MAX), (torch.complex64, AVG), *[(t, SUM) for t in NARROW]]
    sizes = [n + odd for n in (SLICE // 4, SLICE // 2, SLICE, 2 * SLICE + 4096) for odd in (-64, 1)]

    def program(comm):
        reduces = operation in conformance.REDUCTIONS
        for dtype, op in ways if reduces else [(torch.uint8, None)]:
            for size in sizes:
                count = size // dtype.itemsize
                root = count % comm.get_size()
                conformance.check_case(comm, Case(operation, dtype, count, op=op, root=root))

    run(program, layout)


def test_ranks_of_larger_columns_reduce_parts(run):
    """With three hosts or more each rank of a column reduces a part of its share, and sends the result to the
    others."""

    def program(comm):
        for dtype in (torch.float32, *NARROW):
            for op in (SUM, AVG):
                for count in (50_000, 300_001):
                    conformance.check_case(comm, Case("all_reduce", dtype, count, op=op))

    run(program, "a,b,c,d,d,c,b,a")


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter_single"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_narrow_sums_are_rounded_once(run, layout, operation):
    def program(comm):
        for dtype in NARROW:
            for op in (SUM, AVG, PRODUCT):
                for count in (3_001, 300_001):
                    conformance.check_case(comm, Case(operation, dtype, count, op=op, rounds=True))

    run(program, layout)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_in_memory_that_other_ranks_read(run, layout, operation):
    """Such a tensor may come from any communicator. The shares of a host's ranks differ in size."""

    def program(comm):
        rank, size = comm.get_rank(), comm.get_size()
        for dtype in (torch.float32, *NARROW):
            for count in (50_000, 300_001):
                heap = torch.from_numpy(_core.heap_allocate(count * size * dtype.itemsize)).view(dtype)
                everyone = torch.arange(count * size, dtype=torch.int64)
                x = heap if operation in ("reduce_scatter_single", "all_to_all_single") else heap[:count]
                x.copy_((everyone[: len(x)] * 7 + rank) % 61)
                inputs = [(everyone[: len(x)] * 7 + r) % 61 for r in range(size)]
                mine = slice(rank * count, (rank + 1) * count)
                if operation == "all_reduce":
                    comm.all_reduce(x, SUM, False)
                    got, expected = x, sum(inputs)
                elif operation == "reduce_scatter_single":
                    got = torch.empty(count, dtype=dtype)
                    comm.reduce_scatter_single(got, x, SUM, False)
                    expected = sum(inputs)[mine]
                elif operation == "all_gather_single":
                    got = torch.empty(count * size, dtype=dtype)
                    comm.all_gather_single(got, x, False)
                    expected = torch.cat(inputs)
                elif operation == "all_to_all_single":
                    got = torch.empty(count * size, dtype=dtype)
                    comm.all_to_all_single(got, x, False)
                    expected = torch.cat([one[mine] for one in inputs])
                else:
                    comm.broadcast(x, 1, False)
                    got, expected = x, inputs[1]
                assert torch.equal(got, expected.to(dtype)), (dtype, count)

    run(program, layout)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", NARROW)
def test_every_narrow_value_is_carried_as_it_is(run, isa, dtype):
    """Also infinities, NaNs and subnormals; the last vector is not full."""
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).repeat(3)
    everyone = []
    for rank in range(4):
        order = torch.randperm(len(patterns), generator=torch.Generator().manual_seed(rank))
        everyone.append(patterns[order][5:].view(dtype))
    first, second, third, fourth = (values.float() for values in everyone)
    expected = ((first + second) + (third + fourth)).to(dtype)

    def program(comm):
        x = everyone[comm.get_rank()].clone()
        comm.all_reduce(x, SUM, False)
        number = ~expected.isnan()
        assert torch.equal(x.isnan(), ~number)
        assert torch.equal(x.view(torch.int16)[number], expected.view(torch.int16)[number])

    assert _core.set_fold_isa(isa)
    try:
        run(program, "a,a,b,b")
    finally:
        _core.set_fold_isa(BEST)


# --- ranks that call different things ---------------------------------------------------------------------


def calls(comm):
    """Collectives of all ways: by the leaders or the columns, with parts, straight, and in Python."""
    size = comm.get_size()

    def all_reduce(count, dtype=torch.float32, op=SUM):
        return lambda: comm.all_reduce(torch.ones(count, dtype=dtype), op, False)

    def all_gather(count):
        return lambda: comm.all_gather_single(torch.empty(size * count), torch.ones(count), False)

    def reduce_scatter(count):
        return lambda: comm.reduce_scatter_single(torch.empty(count), torch.ones(size * count), SUM, False)

    def all_to_all(count):
        return lambda: comm.all_to_all_single(torch.empty(size * count), torch.ones(size * count), False)

    def broadcast(count):
        return lambda: comm.broadcast(torch.ones(count), 0, False)

    return [
        lambda: comm.barrier(False),
        *[all_reduce(count) for count in (2, 3_000, 200_000)],
        *[all_reduce(count, torch.bfloat16) for count in (2, 3_000, 200_000)],
        all_reduce(3_000, torch.bfloat16, PRODUCT),
        *[all_gather(count) for count in (1, 3_000, 100_000)],
        *[reduce_scatter(count) for count in (1, 3_000, 100_000)],
        *[all_to_all(count) for count in (1, 3_000, 100_000)],
        *[broadcast(count) for count in (1, 3_000, 400_000)],
        lambda: comm.reduce(torch.ones(3), 0, SUM, False),
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_take_different_ways_are_all_told(run, layout, seed):
    """Each collective fails on all ranks with the same error, and the next one succeeds."""

    def program(comm):
        random_choices, me, size = random.Random(seed), comm.get_rank(), comm.get_size()
        every, said = calls(comm), []
        for _ in range(25):
            first, second = random_choices.sample(range(len(every)), 2)
            others = random_choices.sample(range(size), random_choices.randint(1, size - 1))
            with pytest.raises(unicomm.MismatchError) as caught:
                every[second if me in others else first]()
            said.append((caught.value.message, caught.value.culprits))
            every[first]()
            every[second]()
        return said

    ranks = run(program, layout)
    assert all(said == ranks[0] for said in ranks)


@pytest.mark.parametrize("layout", ["a,a,b,b", "a,b,a,b"])
@pytest.mark.parametrize("number", range(19))
def test_a_rank_that_aborts_instead_is_named(run, layout, number):
    ready = threading.Barrier(4)  # a rank may leave one of the communicator while others are still in it

    def program(comm):
        call, me = calls(comm)[number], comm.get_rank()
        ready.wait(60)
        if me == 3:
            comm.abort()
        with pytest.raises(unicomm.AbortedError) as caught:
            call()
        return caught.value.culprits

    assert run(program, layout) == [(3,)] * 4
