"""All that has to work, on 4 ranks."""

import contextlib
import functools
import threading

import numpy as np
import torch

import unicomm
from tests.backends.mpi.programs.mpi_common import comm, me, raised, say, size
from unicomm.backends.mpi import operations as mpi
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.comms.execution.composed import encoded
from unicomm.comms.execution.composed.completion import is_native
from unicomm.comms.operations.call import Call
from unicomm.comms.operations.table import OPERATIONS
from unicomm.testing import conformance

SUM = unicomm.ReduceOp.SUM


def conforms() -> None:
    every = [
        conformance.check(comm, name, lambda case: case.count != 4099) for name in conformance.OPERATIONS
    ]
    every += [conformance.check_rounding(comm, name) for name in conformance.REDUCTIONS]
    say("conforms", me, size=size, cases=min(every))


def conforms_in_splits() -> None:
    """Of 3 and of 2 ranks, in another order than MPI has them; those who are not in it do not come."""
    for ranks in ([2, 0, 3], [3, 1]):
        part = comm.split(ranks if me in ranks else [], f"of {len(ranks)}")
        if part is not None:
            with part:
                every = [conformance.check(part, name, moderate) for name in conformance.OPERATIONS]
                say("conforms", me, size=part.get_size(), cases=min(every))


def moderate(case: conformance.Case) -> bool:
    return case.count in (0, 17, 24, 67)


def conforms_with_options() -> None:
    for name, option in conformance.OPTIONS.items():
        with comm.split(list(range(size)), name, hints=dict(option.hints)) as part:
            cases = conformance.check_option(part, name, lambda case: case.count != 1000)
            x = torch.randn(30000, generator=torch.Generator().manual_seed(me))
            plain = x.clone()
            part.all_reduce(x, SUM, False)
            comm.all_reduce(plain, SUM, False)
            differs = not torch.equal(x, plain)
            say("option", me, name=name, cases=cases, differs=differs, sum=x.double().abs().sum().item())


def encodes_in_chunks() -> None:
    """While other chunks travel; the bits are those of the whole."""
    found = []
    for size_ in (encoded.CHUNK, 1280):
        usual, encoded.CHUNK = encoded.CHUNK, size_
        try:
            x = torch.randn(30000, generator=torch.Generator().manual_seed(me))
            comm.all_reduce(x, SUM, False, hints={"wire": "mxfp8", "checksum": True})
            part = torch.empty(20000)
            whole = torch.randn(20000 * size, generator=torch.Generator().manual_seed(me))
            comm.reduce_scatter_single(part, whole, SUM, False, hints={"wire": "int8"})
            found.append((x, part))
        finally:
            encoded.CHUNK = usual
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def conforms_in_large_pieces() -> None:
    """The ways for more bytes than MPI counts, taken from 1000 bytes on."""
    most, block = mpi._MOST, mpi._BLOCK
    mpi._MOST, mpi._BLOCK = 1000, 256
    try:
        for operation in conformance.OPERATIONS:
            conformance.check(comm, operation, lambda case: case.count == 1000)
    finally:
        mpi._MOST, mpi._BLOCK = most, block


def sums_alike_on_all_ranks() -> None:
    """Sums that depend on their order, of 3 and 4 ranks: the ranks compare their results themselves."""
    part = comm.split([0, 1, 2] if me < 3 else [], "three")
    for of in (comm, part):
        for count in (1, 7, 300, 5000, 70001, 1 << 20) if of is not None else ():
            generator = torch.Generator().manual_seed(100 * me + count)
            x = torch.randn(count, generator=generator) * torch.exp2(
                torch.randn(count, generator=generator) * 8
            )
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
                of.all_reduce(x.to(dtype), SUM, False, hints={"checksum": True})
    if part is not None:
        part.finalize()


FOLD = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def values(dtype: torch.dtype, rank: int) -> np.ndarray:
    """Any bits for whole numbers; else numbers whose sums and products are exact, and the odd ones."""
    generator = np.random.default_rng(1000 * rank + 7)
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    if kind.kind in "iu":
        return generator.integers(0, 256, 1024 * kind.itemsize, dtype=np.uint8).view(kind)
    x = generator.integers(-4, 5, 1024).astype(kind)
    x[:6] = [1.0, np.inf, np.inf, -0.0, 0.0, 1e30]
    x[0] = np.nan if rank == 1 else 1.0
    x[2] = np.inf if rank % 2 else -np.inf
    if kind.kind == "c":
        x.imag = x.real[::-1]
    return x


def reduces_natively() -> None:
    """Each pair of type and reduction that is left to the library gives the bits that ours would give."""
    assert comm.get_capabilities().reductions == mpi.REDUCTIONS
    assert len(mpi.REDUCTIONS) > 50
    for dtype, kind in sorted(mpi.REDUCTIONS, key=str):
        op = unicomm.ReduceOp(kind)
        assert is_native(comm.get_capabilities(), Call(OPERATIONS["all_reduce"], dtype=dtype, op=op))
        parts = [values(dtype, r) for r in range(size)]
        with np.errstate(all="ignore"):
            expected = functools.reduce(FOLD[kind.name], parts)
        assert expected.dtype == parts[0].dtype
        x = torch.from_numpy(parts[me].copy())
        comm.all_reduce(x, op, False)
        assert same(x.numpy(), expected), (dtype, kind)
        part = torch.empty(1024 // size, dtype=dtype)
        comm.reduce_scatter_single(part, torch.from_numpy(parts[me].copy()), op, False)
        assert same(part.numpy(), np.split(expected, size)[me]), (dtype, kind)


def same(got: np.ndarray, expected: np.ndarray) -> bool:
    """Bit for bit, but for which NaN it is and the sign of a zero."""
    if expected.dtype.kind == "c":
        got, expected = got.view(got.real.dtype), expected.view(got.real.dtype)
    return bool(np.array_equal(got, expected, equal_nan=expected.dtype.kind == "f"))


def gathers_persistently() -> None:
    output = torch.zeros(4 * size)
    handle = comm.all_gather_p_init(output)
    for turn in range(5):
        x = torch.full((4,), float(10 * turn + me))
        source = output[4 * me : 4 * me + 4] if turn == 3 else x
        source.copy_(x)
        comm.all_gather_p_exec(handle, source, turn % 2 == 1).wait()
        assert output.tolist() == [float(10 * turn + r) for r in range(size) for _ in range(4)]
        if turn == 2:  # as frameworks free parameters and get them back, somewhere else
            storage, bytes_ = output.untyped_storage(), output.nbytes
            storage.resize_(0)
            kept = torch.full((4 * size,), -1.0)
            storage.resize_(bytes_)
    assert (kept == -1).all()
    assert comm.unsafe_backend._prepared
    comm.all_gather_p_free(handle)
    assert not comm.unsafe_backend._prepared


def tells_mismatches() -> None:
    """On all ranks, before anything is written; the communicator goes on."""
    x = torch.full((4 if me else 5,), 1.0)
    error = raised(lambda: comm.all_reduce(x, SUM, False))
    assert isinstance(error, unicomm.MismatchError)
    assert error.culprits == (0,)
    assert bool((x == 1).all())
    error = raised(lambda: comm.barrier(False) if me == 2 else comm.broadcast(x, 1, False))
    assert isinstance(error, unicomm.MismatchError)
    comm.barrier(False)


def runs_in_the_background() -> None:
    """Operations of two communicators at a time, in threads and asynchronously."""
    other = comm.split(list(reversed(range(size))), "reversed")

    def work(c: unicomm.Communicator, out: list) -> None:
        tensors = [torch.full((1000 * (i + 1),), float(i)) for i in range(20)]
        works = [c.all_reduce(t, SUM, True) for t in tensors]
        for w in works:
            w.wait()
        out.append(all(bool((t == i * size).all()) for i, t in enumerate(tensors)))

    good: list[bool] = []
    threads = [threading.Thread(target=work, args=(c, good)) for c in (comm, other)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert good == [True, True]
    assert other.get_rank() == size - 1 - me
    other.finalize()


def exchanges_side_by_side() -> None:
    """The lane of a process group: sends and receives in any order, also from any rank."""
    group, right, left = UnicommProcessGroup(comm), (me + 1) % size, (me - 1) % size
    for count in (10, 200_000):
        out, back = torch.full((count,), float(me)), torch.zeros(count)
        late = group.recv([back], left, 0)
        group.send([out], right, 0).wait()
        late.wait()
        assert bool((back == left).all())
    if me == 0:
        got = [torch.zeros(3) for _ in range(size - 1)]
        works = [group.recv_anysource([t], 0) for t in got]
        for w, t in zip(works, got, strict=True):
            w.wait()
            assert bool((t == w.source_rank()).all())
        assert sorted(w.source_rank() for w in works) == list(range(1, size))
    else:
        group.send([torch.full((3,), float(me))], 0, 0).wait()


def leaves_the_program_its_own_mpi() -> None:
    from mpi4py import MPI

    assert MPI.COMM_WORLD.allreduce(1) == size
    with unicomm.new_comm("mpi", "cpu", name="another", timeout=60) as another:
        x = torch.ones(3)
        another.all_reduce(x, SUM, False)
        assert MPI.COMM_WORLD.bcast("word" if me == 1 else None, 1) == "word"
        assert bool((x == size).all())


def expects_somebody_slow() -> None:
    """The others' operation is overdue for a second, and rank 0 had asked for time."""
    x = torch.ones(2)
    with comm.expect_slow("a checkpoint", 60) if me == 0 else contextlib.nullcontext():
        comm.barrier(False)
        if me == 0:
            threading.Event().wait(1.0)
        comm.all_reduce(x, SUM, False, timeout=0.2)
    assert bool((x == size).all())


CASES = [
    conforms,
    conforms_in_splits,
    conforms_with_options,
    encodes_in_chunks,
    conforms_in_large_pieces,
    sums_alike_on_all_ranks,
    reduces_natively,
    gathers_persistently,
    tells_mismatches,
    runs_in_the_background,
    exchanges_side_by_side,
    leaves_the_program_its_own_mpi,
    expects_somebody_slow,
]
