"""The hint `checksum`: in records, compared between ranks, and the rank whose bits differ."""

import json
import pickle

import numpy as np
import pytest
import torch

import unicomm
from tests.comms import inside
from unicomm import _core
from unicomm.comms.execution.composed import completion
from unicomm.comms.operations.table import OPERATIONS
from unicomm.flight_recorder.formats.torch_dump import to_dict
from unicomm.flight_recorder.recording import writer
from unicomm.flight_recorder.ring.reader import COMPARED, INPUT_CHECKSUM, OUTPUT_CHECKSUM, read_ring
from unicomm.testing import conformance, run_ranks

SUM = unicomm.ReduceOp.SUM
ON, OFF = {"checksum": True}, {"checksum": "false"}
#: As (backend, hosts): those of several hosts go through hosts.
PLACES = [("shm", 2), ("shm", 3), ("shm", 4), ("gloo", 2), ("gloo", 3), ("tcp", 3), ("abb", 3), ("abab", 4)]


def run(program, place, size, **more):
    backend, hints = place, dict(more.pop("hints", {}))
    if set(place) <= set("abcd"):
        backend, hints = "auto", {"hosts": ",".join(place), **hints}
    return run_ranks(program, size, backend=backend, hints=hints, **more)


def last_record(comm, number=1):
    """The newest record of a communicator."""
    ring = read_ring(writer.ring_bytes())
    index = inside.engine(comm).member.recorder_index
    return ring, ring.records[ring.records["comm"] == index][-number]


def sums(comm, number=1):
    """(flags, input, output) of the newest record; None where there is no checksum."""
    _, record = last_record(comm, number)
    flags = int(record["flags"])
    return (
        int(record["input_checksum"]) if flags & INPUT_CHECKSUM else None,
        int(record["output_checksum"]) if flags & OUTPUT_CHECKSUM else None,
        bool(flags & COMPARED),
    )


# --- records ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "size"), PLACES)
def test_records_have_the_checksums_of_what_was_read_and_written(place, size):
    def program(comm):
        me, n = comm.get_rank(), comm.get_size()
        x = torch.full((1000,), float(me))
        before = _core.checksum([x])
        comm.all_reduce(x, SUM, hints=ON)
        assert sums(comm) == (before, _core.checksum([x]), True)
        comm.broadcast(x, 1, hints=ON)
        given = _core.checksum([x]) if me == 1 else None  # what the others had before is not read
        assert sums(comm) == (given, _core.checksum([x]), True)
        y = torch.full((7,), float(me))
        comm.reduce(y, 0, SUM, hints=ON)
        found = sums(comm)
        assert found[0] == _core.checksum([torch.full((7,), float(me))])
        assert found[1:] == (_core.checksum([y]) if me == 0 else None, False)
        outs = [torch.empty(3) for _ in range(n)]
        comm.all_gather(outs, torch.full((3,), float(me)), hints=ON)
        assert sums(comm) == (_core.checksum([torch.full((3,), float(me))]), _core.checksum(outs), True)
        comm.barrier(hints=ON)
        assert sums(comm) == (None, None, False) if n == 1 else sums(comm)[:2] == (None, None)
        out, parts = torch.empty(2), torch.arange(2.0 * n)
        comm.reduce_scatter_single(out, parts, SUM, hints=ON)
        assert sums(comm) == (_core.checksum([parts]), _core.checksum([out]), False)
        comm.all_reduce(x, SUM)
        assert sums(comm) == (None, None, False)
        return _core.checksum([x])

    assert len(set(run(program, place, size))) == 1


@pytest.mark.parametrize(("place", "size"), PLACES)
def test_messages_have_one_checksum_on_both_sides(place, size):
    def program(comm):
        me = comm.get_rank()
        if me < 2:
            x = torch.arange(50.0) if me == 0 else torch.empty(50)
            (comm.send if me == 0 else comm.recv)(x, 1 - me, hints=ON)
            want = _core.checksum([torch.arange(50.0)])
            assert sums(comm) == ((want, None, False) if me == 0 else (None, want, False))
            batch = comm.batch_op_create()
            batch.send(torch.full((3,), me + 1.0), 1 - me)
            y = torch.empty(3)
            batch.recv(y, 1 - me)
            batch.issue(False, hints=ON)
            mine, theirs = (_core.checksum([torch.full((3,), v)]) for v in (me + 1.0, 2.0 - me))
            assert sums(comm, 2) == (mine, None, False)
            assert sums(comm, 1) == (None, theirs, False)
        comm.barrier()

    run(program, place, size)


def test_queued_messages_of_process_groups():
    def program(comm):
        me = comm.get_rank()
        x = torch.arange(50.0) if me == 0 else torch.empty(50)
        inside.post(comm, "send" if me == 0 else "recv", x, 1 - me).wait()
        want = _core.checksum([torch.arange(50.0)])
        assert sums(comm) == ((want, None, False) if me == 0 else (None, want, False))

    for backend in ("shm", "gloo"):
        run_ranks(program, 2, backend=backend, hints=ON)


def test_asynchronous_operations_and_one_rank():
    def program(comm):
        x = torch.ones(10)
        works = [comm.all_reduce(x, SUM, async_op=True, hints=ON) for _ in range(3)]
        unicomm.wait_all(works)
        n = comm.get_size()
        assert sums(comm) == (
            _core.checksum([torch.full((10,), float(n) ** 2)]),
            _core.checksum([torch.full((10,), float(n) ** 3)]),
            n > 1,
        )

    run_ranks(program, 1)
    run_ranks(program, 3)


def test_of_a_communicator_a_split_and_one_call(monkeypatch):
    def program(comm):
        x = torch.ones(4)
        comm.all_reduce(x, SUM)
        inherited = sums(comm)[2]
        comm.all_reduce(x, SUM, hints=OFF)
        excepted = sums(comm)[2]
        child = comm.split([0, 1], "child")
        child.all_reduce(x, SUM)
        of_child = sums(child)[2]
        child.finalize()
        other = comm.split([0, 1], "other", hints={"checksum": False})
        other.all_reduce(x, SUM)
        of_other = sums(other)[2]
        other.finalize()
        return inherited, excepted, of_child, of_other

    assert run_ranks(program, 2, hints=ON) == [(True, False, True, False)] * 2
    assert run_ranks(program, 2) == [(False, False, False, False)] * 2
    monkeypatch.setenv("UNICOMM_CHECKSUM", "1")
    assert run_ranks(program, 2) == [(True, False, True, False)] * 2


def test_dumps_carry_them():
    def program(comm):
        x = torch.full((5,), comm.get_rank() + 1.0)
        comm.all_reduce(x, SUM, hints=ON)
        comm.all_reduce(x, SUM)
        ring, _ = last_record(comm)
        index = inside.engine(comm).member.recorder_index
        return to_dict(ring, comms=[index], last=2), _core.checksum([torch.full((5,), 3.0)])

    for dump, want in run_ranks(program, 2):
        from unicomm.flight_recorder.formats.dump_columns import from_dump

        first, second = dump["entries"]
        assert first["unicomm_output_checksum"] == f"{want:016x}"
        assert first["unicomm_compared"] is True
        assert not any("checksum" in key or key == "unicomm_compared" for key in second)
        columns = from_dump(json.loads(json.dumps(dump))).extra
        native = _core.read_dump(pickle.dumps(dump, 2))["extra"]
        assert set(native) == set(columns)
        assert columns["unicomm_flags"].tolist() == [INPUT_CHECKSUM | OUTPUT_CHECKSUM | COMPARED, 0]
        assert columns["unicomm_output_checksum"].tolist() == [want, 0]
        for name, column in columns.items():
            assert np.array_equal(column, native[name]), name


@pytest.mark.parametrize("text", ["", "123", "00000000000000zz", "-000000000000001", 7, None, "0" * 17])
def test_a_damaged_checksum_in_a_dump_is_none(text):
    from unicomm.flight_recorder.formats.dump_columns import from_dump

    dump = {"entries": [{"unicomm_input_checksum": text, "unicomm_output_checksum": "ABCDEF0123456789"}]}
    for extra in (from_dump(dump).extra, _core.read_dump(pickle.dumps(dump, 2))["extra"]):
        assert extra["unicomm_flags"].tolist() == [OUTPUT_CHECKSUM]
        assert extra["unicomm_input_checksum"].tolist() == [0]
        assert extra["unicomm_output_checksum"].tolist() == [0xABCDEF0123456789]


# --- agreement -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(n for n, row in OPERATIONS.items() if row.is_collective))
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_every_collective_runs_with_checksums(backend, name):
    """No false finding: for all element types, reductions, sizes and layouts the ranks' results are alike."""
    counts = run_ranks(
        lambda comm: conformance.check(comm, name, lambda case: case.count in (0, 17, 67, 1000)),
        3,
        backend=backend,
        hints=ON,
    )
    assert counts[0] > 10


ORDERS = [*PLACES, ("shm", 8), ("gloo", 5), ("aabbb", 5)]


@pytest.mark.parametrize("hints", [{}, {"reduction": "reproducible"}], ids=["ordinary", "reproducible"])
@pytest.mark.parametrize(("place", "size"), ORDERS)
def test_sums_that_depend_on_their_order_are_alike_on_all_ranks(place, size, hints):
    """The ranks compare their results themselves: this program fails with a SilentCorruptionError if not."""

    def program(comm):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for count in (1, 5, 1000, 70001, 300007):
                generator = torch.Generator().manual_seed(comm.get_rank() * 100 + count)
                x = torch.randn(count, generator=generator) * torch.exp2(
                    torch.randn(count, generator=generator) * 8
                )
                for op in (SUM, unicomm.ReduceOp.AVG):
                    comm.all_reduce(x.to(dtype), op)
        return sums(comm)[2]

    assert run(program, place, size, hints={**hints, **ON}) == [True] * size


@pytest.mark.parametrize(("place", "size"), PLACES)
def test_nan_is_no_corruption(place, size):
    """Which NaN a sum gives is not defined."""

    def program(comm):
        me = comm.get_rank()
        for count in (3, 1000, 70001):
            x = torch.zeros(count)
            bits = x.view(torch.int32)
            bits[me::3] = 0x7F800001 + 77 * me
            bits[1::5] = -1 - me
            x[2] = float("inf") if me % 2 else -float("inf")
            comm.all_reduce(x, SUM)

    run(program, place, size, hints=ON)


def test_nans_of_other_bits_are_not_compared_and_other_numbers_are(monkeypatch):
    """A rank whose result has another NaN, and one that has another number as well."""
    change = {"number": False}

    def flipping(group, call, run=completion.run):
        run(group, call)
        if call.name == "all_reduce" and group.rank == 1:
            call.outputs[0].view(torch.int32)[0] = 0x7FC00ABC
            if change["number"]:
                call.outputs[0][1] += 1.0

    monkeypatch.setattr(completion, "run", flipping)

    def program(comm):
        x = torch.tensor([float("nan"), 2.0])
        comm.all_reduce(x, SUM, hints=ON)
        return sums(comm)[2]

    assert run_ranks(program, 3) == [False] * 3
    change["number"] = True
    with pytest.raises(unicomm.SilentCorruptionError) as caught:
        run_ranks(program, 3)
    assert caught.value.culprits == (1,)


# --- what is found ---------------------------------------------------------------------------------------


def flips(monkeypatch, ranks, name, nth=1):
    """Flips a bit of the result of the `nth` operation `name` on some ranks, before the ranks compare."""
    seen = {}

    def flipping(group, call, run=completion.run):
        run(group, call)
        if call.name == name and call.dtype is not torch.uint8:
            seen[group.rank] = seen.get(group.rank, 0) + 1
            if group.rank in ranks and seen[group.rank] == nth:
                call.outputs[-1].view(torch.uint8)[2] ^= 16

    monkeypatch.setattr(completion, "run", flipping)


def calls(comm, x, name, hints=None):
    n = comm.get_size()
    if name == "all_reduce":
        return comm.all_reduce(x, SUM, hints=hints)
    if name == "broadcast":
        return comm.broadcast(x, 0, hints=hints)
    if name == "all_gather_single":
        return comm.all_gather_single(torch.empty(n * x.numel()), x, hints=hints)
    return getattr(comm, name)([torch.empty_like(x) for _ in range(n)], x, hints=hints)


@pytest.mark.parametrize("name", sorted(n for n, row in OPERATIONS.items() if row.alike))
@pytest.mark.parametrize(("place", "size"), [("shm", 3), ("gloo", 4), ("abb", 3)])
def test_the_rank_with_other_bits_is_named(monkeypatch, place, size, name):
    flips(monkeypatch, {1}, name, nth=2)

    def program(comm):
        x = torch.ones(100)
        calls(comm, x, name)
        with pytest.raises(unicomm.SilentCorruptionError) as caught:
            calls(comm, x, name)
        error = caught.value
        assert (error.op, error.seq, error.culprits, error.rank) == (name, 2, (1,), comm.get_rank())
        assert error.message.count("test_checksums.py:") == 2, error.message
        assert "rank 1: checksum" in error.message
        _, record = last_record(comm)
        assert (int(record["state"]), int(record["error"])) == (4, 8)
        assert sums(comm)[2]
        comm.all_reduce(torch.ones(3), SUM)  # the ranks are in step
        return str(error).splitlines()[-1]

    hints = run(program, place, size, hints=ON)
    assert len(set(hints)) == 1
    assert "rank 1" in hints[0]


def test_without_a_majority_all_are_named_and_the_text_says_why(monkeypatch):
    flips(monkeypatch, {0}, "all_reduce")

    def program(comm):
        with pytest.raises(unicomm.SilentCorruptionError, match="no majority") as caught:
            comm.all_reduce(torch.ones(100), SUM, hints=ON)
        return caught.value.culprits

    assert run_ranks(program, 2) == [(0, 1)] * 2
    flips(monkeypatch, {0, 2}, "all_reduce")
    assert run_ranks(program, 4) == [(0, 1, 2, 3)] * 4
    flips(monkeypatch, {2}, "all_reduce")
    with pytest.raises(AssertionError):
        run_ranks(program, 4)  # a majority: the text does not say so


def test_an_asynchronous_operation_ends_with_the_error(monkeypatch):
    flips(monkeypatch, {2}, "all_reduce")

    def program(comm):
        work = comm.all_reduce(torch.ones(100), SUM, async_op=True, hints=ON)
        with pytest.raises(unicomm.SilentCorruptionError):
            work.wait()
        with pytest.raises(unicomm.SilentCorruptionError):
            work.wait()

    run_ranks(program, 3)


def test_the_error_travels_by_pickle(monkeypatch):
    flips(monkeypatch, {2}, "all_reduce")
    with pytest.raises(unicomm.SilentCorruptionError) as caught:
        run_ranks(lambda comm: comm.all_reduce(torch.ones(9), SUM, hints=ON), 3)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (unicomm.SilentCorruptionError, str(caught.value))


# --- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_ranks_that_disagree_get_a_mismatch(backend):
    def program(comm):
        hints = ON if comm.get_rank() == 0 else None
        with pytest.raises(unicomm.MismatchError, match="checksum") as caught:
            comm.all_reduce(torch.ones(3), SUM, hints=hints)
        outs = [torch.empty(r + 1) for r in range(3)]
        with pytest.raises(unicomm.MismatchError, match="checksum"):
            comm.all_gather_v(outs, torch.ones(comm.get_rank() + 1), hints=hints)
        return caught.value.culprits

    assert run_ranks(program, 3, backend=backend) == [(0,)] * 3


def test_unreadable_hints():
    def program(comm):
        with pytest.raises(unicomm.InvalidArgumentError, match="expected true or false"):
            comm.all_reduce(torch.ones(3), SUM, hints={"checksum": "md5"})
        with pytest.raises(unicomm.UnsupportedError, match="takes no hints"):
            comm.send(torch.ones(3), 1 - comm.get_rank(), hints={"reduction": "reproducible"})
        with pytest.raises(unicomm.UnsupportedError, match="takes no hints"):
            comm.barrier(hints={"checksum": True, "other": "1"})
        comm.barrier()

    run_ranks(program, 2)
    with pytest.raises(unicomm.InvalidArgumentError, match="expected true or false"):
        run_ranks(program, 1, hints={"checksum": "maybe"})


def test_a_backend_that_moves_nothing_has_none():
    def program(comm):
        comm.all_reduce(torch.ones(3), SUM, hints=ON)
        return sums(comm)

    assert run_ranks(program, 2, backend="fake") == [(None, None, False)] * 2


def test_the_fast_path_is_left_alone():
    def program(comm):
        comm.barrier()
        fast = inside.fast_path(comm)
        return fast.all_reduce(torch.ones(3), SUM, False, None, None) is not False

    assert run_ranks(program, 2) == [True] * 2
    assert run_ranks(program, 2, hints=ON) == [False] * 2


def test_of_several_contributions():
    """What was read are the contributions, not the tensor that the sum goes to."""

    def program(comm):
        rows = torch.arange(12.0).reshape(3, 4) + comm.get_rank()
        out = torch.empty(4)
        comm.all_reduce_contributions(out, rows, SUM, hints=ON)
        assert sums(comm) == (_core.checksum([rows]), _core.checksum([out]), True)

    run_ranks(program, 2)
