"""What ranks with symmetric memory on a device do: on the mocks as threads and processes, and on GPUs."""

import pytest
import torch

import unicomm
from tests.symm.exchanges import check_collectives, check_experts, host, shared
from tests.symm.matrices import check_tiles
from unicomm import symm


def exchanges(comm):
    """Every composite, beside numpy."""
    check_experts(comm, 3, [1, 8, 16, 128], seed=5)
    check_tiles(comm, torch.float32, seed=5)
    check_collectives(comm, torch.float32, (5, 3), seed=5)


def more_exchanges(comm):
    """Other types, and more experts than upstream takes."""
    check_experts(comm, 1, [1], seed=6, width=5, dtype=torch.bfloat16)
    check_experts(comm, 40, [16], seed=7, width=1, dtype=torch.int16)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32):
        check_tiles(comm, dtype, seed=5)
        check_collectives(comm, dtype, (4, 7), seed=6)
    symm.synchronize(comm)


def large(comm):
    """Many blocks, and parts that are no multiple of 16 bytes."""
    n, me = comm.get_size(), comm.get_rank()
    for dtype, count in ((torch.float32, 300_001), (torch.float16, 70_003), (torch.int8, 99_999)):
        data = torch.arange(count * n).view(n, count) % 13 - 6
        x = shared(comm, data[me].to(dtype))
        wanted = data.sum(0).to(dtype)
        assert torch.equal(host(symm.one_shot_all_reduce(x, comm)), wanted)
        assert torch.equal(host(symm.one_shot_all_reduce(x[3:], comm)), wanted[3:])
        symm.two_shot_all_reduce_(x[1:], comm)
        assert torch.equal(host(x)[1:], wanted[1:])
        assert torch.equal(host(symm.broadcast(x, n - 1, comm))[1:], wanted[1:])
        symm.free(x, comm)


def subnormal(comm):
    """Numbers that a compiler may be told to take for zero."""
    n, me = comm.get_size(), comm.get_rank()
    for dtype, smallest in ((torch.float32, 2.0**-149), (torch.bfloat16, 2.0**-133)):
        x = shared(comm, torch.full((9,), (me + 1) * smallest, dtype=torch.float64).to(dtype))
        for op, times in (("sum", n * (n + 1) // 2), ("min", 1), ("max", n)):
            total = host(symm.one_shot_all_reduce(x, comm, op))
            assert (total.double() == times * smallest).all(), (dtype, op)
        symm.free(x, comm)


def windows(comm):
    """Puts, gets, counted signals, atomics."""
    n, me, device = comm.get_size(), comm.get_rank(), comm.get_device()
    after, before = (me + 1) % n, (me - 1) % n
    room = shared(comm, torch.zeros(8))
    window = comm.new_window(room)
    for step in range(5):
        window.put(torch.tensor([step, me], dtype=torch.float32, device=device), after, 3, False)
        window.signal(after, False)
        window.wait_signal(before, False)
        assert host(room).tolist() == [0, 0, 0, step, before, 0, 0, 0]
        window.signal(before, False)
        window.wait_signal(after, False)
    got = torch.zeros(2, device=device)
    window.get(got, after, 3, False)
    assert host(got).tolist() == [4, me]
    assert host(window.map_remote_tensor(after))[3:5].tolist() == [4, me]
    window.free()
    counts = comm.new_window(shared(comm, torch.zeros(4, dtype=torch.int64)))
    for _ in range(5):
        counts.fetch_add(0, 1, -1)
    counts.barrier()
    own = counts.get_tensor()
    assert own is not None
    if me == 0:
        assert host(own).tolist() == [0, -5 * n, 0, 0]
        assert counts.fetch_add(0, 1, 7) == -5 * n
        assert counts.compare_swap(0, 1, 7 - 5 * n, 3) == 7 - 5 * n
        assert counts.compare_swap(0, 1, 8, 9) == 3
        assert host(own)[1] == 3
    counts.free()
    pad = shared(comm, [0, 0])
    x = shared(comm, torch.full((5,), float(me)))
    symm.put_signal(x[me : me + 1], pad[1], 7, after, comm)
    symm.wait_signal(pad[1], 7, before, comm)
    assert host(x).tolist() == [before if i == before else me for i in range(5)]
    comm.barrier(False)
    if me == 0:  # whoever gets changes its own
        symm.get(x, after, comm)
        assert host(x[4:]).tolist() == [after]
    symm.synchronize(comm)


def settled(comm, call):
    """With the errors that the device found."""
    call()
    symm.synchronize(comm)


def refusals(comm):
    """The same errors on all ranks, nothing written, and all go on."""
    n, me = comm.get_size(), comm.get_rank()
    x, out = shared(comm, torch.ones(6)), shared(comm, torch.zeros(6))
    there = shared(comm, torch.full((2, n), -1))
    splits = shared(comm, [0, 3] + [0] * (n - 2))  # rank 1 gets too many rows
    need = 3 * n
    small = need > 6

    def refused(call, match, culprits, kind=unicomm.InvalidArgumentError):
        with pytest.raises(kind, match=match) as error:
            settled(comm, call)
        assert tuple(error.value.culprits) == culprits
        assert error.value.hint
        symm.synchronize(comm)  # it is told once

    if small:
        for call in (
            lambda: symm.all_to_all_vdev(x, out, splits, there, comm),
            lambda: symm.all_to_all_vdev_2d(x, out, splits, there, comm),
            lambda: symm.all_to_all_v(x, out, [0, 3] + [0] * (n - 2), comm, relaxed=True),
        ):
            refused(call, f"rank 1 would receive into row {need}", (1,))
    assert not host(out).any()
    assert (host(there) == -1).all()
    if me == 1:
        splits[0] = -1
    refused(lambda: symm.all_to_all_vdev(x, out, splits, there, comm), "splits of rank 1", (1,))
    splits.fill_(7 if me == 0 else 0)
    refused(lambda: symm.all_to_all_vdev_2d(x, out, splits, there, comm), "splits of rank 0", (0,))
    both = shared(comm, torch.stack([torch.ones(n), torch.full((n,), 6.0)]).long())
    refused(lambda: symm.all_to_all_vdev_2d_offset(x, out, both, there, comm), "splits of rank 0", (0,))
    assert not host(out).any()
    assert (host(there) == -1).all()
    assert symm.all_to_all_v(x, out, [1] * n, comm) == [1] * n
    # Different operations, and different tensors.
    mismatch = unicomm.MismatchError
    calls = [
        lambda: symm.one_shot_all_reduce(x, comm),
        lambda: symm.all_to_all_vdev(x, out, splits, there, comm),
        lambda: symm.broadcast(x, 0, comm),
    ]
    everyone = tuple(range(n))
    for shift in (1, 2):
        mine = calls[shift if me == 0 else 0]
        refused(mine, "different operations", everyone if n == 2 else (0,), mismatch)
        assert host(symm.one_shot_all_reduce(x, comm)).tolist() == [n] * 6
    refused(lambda: symm.broadcast(x, me, comm), "broadcast of root 0", everyone, mismatch)
    y = x[:3] if me == n - 1 else x[3:]
    refused(
        lambda: symm.one_shot_all_reduce(y, comm),
        "tensors at other places",
        everyone if n == 2 else (n - 1,),
        mismatch,
    )


def all_of_it(comm, more=False):
    symm.init(comm, heap_bytes=64 << 20)
    lacks = symm.Capability.HEAP | symm.Capability.POINTER | symm.Capability.SIGNAL | symm.Capability.ATOMICS
    assert symm.capabilities(comm) & lacks == lacks
    exchanges(comm)
    if more:
        more_exchanges(comm)
    large(comm)
    subnormal(comm)
    windows(comm)
    refusals(comm)


def teams(comm):
    """Some of the ranks, on the memory of all."""
    symm.init(comm)
    x = shared(comm, torch.full((4,), float(comm.get_rank())))
    team = comm.split([0, 2] if comm.get_rank() % 2 == 0 else [1, 3])
    symm.init_team(team, comm)
    total = host(symm.one_shot_all_reduce(x, team))[0].item()
    symm.synchronize(team)
    team.finalize()
    return total
