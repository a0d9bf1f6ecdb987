"""torch's own symmetric memory on CPU tensors, as a program for GPUs uses it: torch_symmetric.py HOW BACKEND

all    every operation, in the world and in a part of it, compared with what each rank's numbers say
wait   rank 0 waits for signals of rank 1, which never come; first with a timeout
alone  rank 0 meets nobody
again  a second job's group, which has the name of the first one and other ranks
rows, dtypes, tiles, pads, outs: one check of CHECKS, in the world
"""

import gc
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tests.old_torch import OLD_TORCH
from tests.processes.programs.common import hear, leave, reporting, say
from tests.symm.exchanges import FILL, plans
from tests.symm.reference import combine, dispatch
from unicomm import symm

HOW, BACKEND = sys.argv[1:]
dist.init_process_group(BACKEND)
names = symm.use_in_torch()
assert symm.use_in_torch() == names
assert symm_mem.get_backend("cpu") == "UNICOMM"
symm_mem.set_backend("NCCL")  # what a program for GPUs may say; put_signal goes by the name
ops = torch.ops.symm_mem


def made(values, group):
    """A symmetric tensor with these values here; all ranks of the group have theirs when it returns."""
    values = torch.as_tensor(values)
    tensor = symm_mem.empty(values.shape, dtype=values.dtype, device="cpu")
    assert OLD_TORCH or symm_mem.is_symm_mem_tensor(tensor)
    tensor.copy_(values)
    handle = symm_mem.rendezvous(tensor, group)
    handle.barrier()
    return tensor, handle


def check_handle(me, n, group):
    tensor, handle = made(torch.arange(6.0) + 10 * me, group)
    assert (handle.rank, handle.world_size, handle.buffer_size) == (me, n, 24)
    assert symm_mem.rendezvous(tensor, group).buffer_ptrs == handle.buffer_ptrs
    assert not handle.multicast_ptr
    for peer in range(n):
        assert handle.get_buffer(peer, (2, 2), torch.float32, 2).flatten().tolist() == [
            10 * peer + i for i in range(2, 6)
        ]
        assert handle.get_remote_tensor(peer, (3,), torch.float32).tolist() == [
            10 * peer + i for i in range(3)
        ]
    theirs = ops.get_remote_tensors(tensor, group)
    assert [t[0].item() for t in theirs] == [10 * p for p in range(n)]
    handle.barrier(channel=1)
    handle.get_buffer((me + 1) % n, (1,), torch.float32, 5).fill_(100 + me)
    handle.put_signal((me + 1) % n, channel=2)
    handle.wait_signal((me - 1) % n, channel=2)
    assert tensor[5].item() == 100 + (me - 1) % n
    handle.barrier(channel=2)
    assert not handle.get_signal_pad(me).any()  # as the program left it
    with pytest.raises(RuntimeError):
        handle.get_buffer(0, (7,), torch.float32)


def check_workspace(me, n, group):
    """Memory of the group, which stays until more is asked for."""
    for size, held in ((64, 64), (16, 64), (256, 256)):
        handle = symm_mem.get_symm_mem_workspace(group, size)
        assert handle.buffer_size == held
        handle.barrier()
        handle.get_buffer((me + 1) % n, (2,), torch.float32, 3).fill_(size + me)
        handle.barrier()
        assert handle.get_buffer(me, (2,), torch.float32, 3).tolist() == [size + (me - 1) % n] * 2


def check_reductions(me, n, group, dtype):
    rng = np.random.default_rng(3)
    data = torch.from_numpy(rng.integers(-4, 5, (n, n, 2, n))).to(dtype)
    total = data.double().sum(0).to(dtype)
    x, _ = made(data[me], group)
    assert torch.equal(ops.one_shot_all_reduce(x, "sum", group), total)
    out = torch.empty_like(total)
    for op in (ops.one_shot_all_reduce_out, ops.multimem_one_shot_all_reduce_out):
        assert op(x, "sum", group, out.zero_()) is out
        assert torch.equal(out, total)
    assert torch.equal(ops.multimem_one_shot_all_reduce(x[1:], "sum", group), total[1:])
    if n > 1:
        ops.multimem_one_shot_reduce_out(x, "sum", 1, group, out.zero_())
        assert torch.equal(out, total if me == 1 else torch.zeros_like(out))
    local = data[me] + 1
    assert torch.equal(ops.one_shot_all_reduce_copy(x, local, "sum", group), total + n)
    ops.one_shot_all_reduce_copy_out(x, data[me], "sum", group, out)
    assert torch.equal(out, total)
    part = torch.empty(2, n, dtype=dtype)
    ops.reduce_scatter_out(x, group, False, part)
    assert torch.equal(part, total[me])
    column = torch.empty(n, 2, 1, dtype=dtype)
    ops.reduce_scatter_out(x, group, True, column)
    assert torch.equal(column, total[..., me : me + 1])
    ops.two_shot_all_reduce_out(x, "sum", group, out.zero_())
    assert torch.equal(out, total)
    for op in (ops.two_shot_all_reduce_, ops.multimem_all_reduce_):
        y, _ = made(data[me], group)
        op(y, "sum", group)
        assert torch.equal(y, total)
    whole, _ = made(torch.zeros(n, 3, dtype=dtype), group)
    ops.multimem_all_gather_out(torch.full((1, 3), me, dtype=dtype), group, whole)
    assert whole[:, 0].tolist() == list(range(n))
    blocks, _ = made(torch.zeros_like(data[me]), group)
    z, handle = made(data[me], group)
    ops.nvshmem_all_to_all(z, blocks, group)
    assert torch.equal(blocks, data[:, me])
    handle.barrier()
    ops.nvshmem_broadcast(z, n - 1, group)
    assert torch.equal(z, data[n - 1])


def check_tiles(me, n, group):
    x, handle = made(torch.arange(24.0).view(4, 6) + me, group)
    tile, wanted = x[1:3, 2:5], n * torch.arange(24.0).view(4, 6) + sum(range(n))
    out, _ = made(torch.zeros(4, 6), group)
    ops.tile_reduce(tile, out[1:3, 2:5], n - 1, group, "sum")
    right = torch.zeros(4, 6)
    right[1:3, 2:5] = wanted[1:3, 2:5]
    assert torch.equal(out, right if me == n - 1 else torch.zeros(4, 6))
    handle.barrier()
    out.zero_()
    ops.multi_root_tile_reduce([x[i : i + 1] for i in range(n)], out[:1], list(range(n))[::-1], group)
    assert torch.equal(out[0], wanted[n - 1 - me])
    if OLD_TORCH:
        return  # no reduce_scatter_offset
    ends = [1, 1, 4, 6]
    roots = [0, n - 1, 0, n - 1]
    mine = [i for i in range(4) if roots[i] == me]
    begins = [0, 1, 1, 4]
    outs = [torch.empty(4, ends[i] - begins[i]) for i in mine]
    symm_mem.reduce_scatter_offset(x, outs, group, dim=1, offsets=ends, dst_ranks=roots)
    for i, got in zip(mine, outs, strict=True):
        assert torch.equal(got, wanted[:, begins[i] : ends[i]])


def check_one_sided(me, n, group):
    following, previous = (me + 1) % n, (me - 1) % n
    x, handle = made(torch.zeros(4, dtype=torch.int64), group)
    pad, pads = made(torch.zeros(2, dtype=torch.int64), group)
    for turn in range(n):  # one after the other: a put reads where another one writes
        x.fill_(me)
        handle.barrier()
        if me == turn:
            ops.nvshmem_put_with_signal(x[1:3], pad[1:], 7 + me, following)
            ops.nvshmem_put(x[3:], following)
            ops.nvshmem_get(x[:1], previous)
            assert x[0].item() == previous
        if previous == turn:
            ops.nvshmem_wait_for_signal(pad[1:], 7 + previous, previous)
            assert x[1:3].tolist() == [previous] * 2
        handle.barrier()
        assert x[3].item() == (previous if previous == turn else me)
    for count in range(1, 4):  # signals count: nobody waits with them
        symm_mem.put_signal(torch.tensor([10 * me + count]), handle, following)
    for _ in range(3):
        symm_mem.wait_signal(handle, previous)
    assert x[0].item() == 10 * previous + 3
    words, _ = made(torch.zeros(4, dtype=torch.uint32), group)
    ops.memset32_(words, 1, 9, 2)
    ops.stream_write_value32_(words, 3, 4)
    assert words.tolist() == [0, 9, 9, 4]
    pads.barrier()


def check_experts(me, n, group, experts):
    rng = np.random.default_rng(11 + experts)
    k = n * experts
    most, capacity = 40 * k, 40 * k * n + 16 * experts
    x, _ = made(torch.zeros(most, 3), group)
    sent, back = (made(torch.full((capacity, 3), FILL), group)[0] for _ in range(2))
    splits, handle = made(torch.zeros(k, dtype=torch.int64), group)
    there, again = (made(torch.zeros(2, k, dtype=torch.int64), group)[0] for _ in range(2))
    for align in (1, 8):
        for plan in plans(rng, n, experts):
            data = rng.integers(-100, 100, (n, most, 3)).astype(np.float32)
            outs = np.full((n, capacity, 3), FILL, np.float32)
            x.copy_(torch.from_numpy(data[me]))
            splits.copy_(torch.from_numpy(plan[me]))
            sent.fill_(FILL)
            wanted = dispatch(data, plan.tolist(), outs, align)
            ops.all_to_all_vdev_2d(x, sent, splits, there, group, align)
            assert (there.numpy() == wanted[me]).all()
            assert (sent.numpy() == outs[me]).all()
            returned = np.full((n, capacity, 3), FILL, np.float32)
            wanted = combine(outs, wanted, returned)
            back.fill_(FILL)
            ops.all_to_all_vdev_2d_offset(sent, back, there, again, group)
            assert (again.numpy() == wanted[me]).all()
            assert (back.numpy() == returned[me]).all()
            if experts == 1:
                flat = np.full((n, capacity, 3), FILL, np.float32)
                wanted = dispatch(data, plan.tolist(), flat, None)
                sent.fill_(FILL)
                ops.all_to_all_vdev(x, sent, splits, there, group)
                assert (there.numpy() == wanted[me]).all()
                assert (sent.numpy() == flat[me]).all()
    small, _ = made(torch.zeros(1, 3), group)
    splits.fill_(1)
    with pytest.raises(RuntimeError, match="nothing was written"):
        ops.all_to_all_vdev_2d(x, small, splits, there, group)
    assert not small.any()
    check_refusals(me, n, group, x, splits, handle)


def check_refusals(me, n, group, x, splits, handle):
    """Sizes may differ between the ranks: each checks what the others said of theirs."""
    k = splits.numel()
    there, _ = made(torch.zeros(2, k, dtype=torch.int64), group)
    room, _ = made(torch.full((k * n, 3), FILL), group)
    splits.fill_(1)
    with pytest.raises(RuntimeError, match=f"rank 1 would receive into row {k} of an out of 1 rows"):
        ops.all_to_all_vdev_2d(x, room[:1] if me == 1 else room, splits, there, group)
    assert (room == FILL).all()
    ops.all_to_all_vdev_2d(x[: k + me], room, splits, there, group)  # rank 0 has just the rows that it sends
    assert there[0].tolist() == [1] * k
    room.fill_(FILL)
    splits[k - 1] = 2**63 - 1
    with pytest.raises(RuntimeError, match="splits of rank 0 go beyond"):
        ops.all_to_all_vdev_2d(x, room, splits, there, group)
    ahead, _ = made(torch.ones(2, k, dtype=torch.int64), group)
    ahead[1, 0] = 2**63 - 1
    with pytest.raises(RuntimeError, match="splits of rank 0 go beyond"):
        ops.all_to_all_vdev_2d_offset(x, room, ahead, there, group)
    assert (room == FILL).all()
    handle.barrier()


def check_in_python(me, n, group):
    a = torch.arange(8.0).view(2, 4) + me
    b = torch.arange(12.0).view(4, 3)
    whole = torch.cat([torch.arange(8.0).view(2, 4) + p for p in range(n)])
    gathered, (product,) = ops.fused_all_gather_matmul(a, [b], 0, group)
    assert torch.equal(gathered, whole)
    torch.testing.assert_close(product, whole @ b)
    rows = torch.arange(4.0 * n).view(n, 4)
    torch.testing.assert_close(
        ops.fused_matmul_reduce_scatter(rows, b, "sum", 0, group), n * (rows @ b)[me : me + 1]
    )
    assert torch.equal(ops._low_contention_all_gather(a, group), whole)
    assert torch.equal(ops._low_contention_reduce_scatter(rows, "sum", group), n * rows[me : me + 1])


def check_errors(me, group):
    plain = torch.ones(4)
    assert OLD_TORCH or not symm_mem.is_symm_mem_tensor(plain)
    x, _ = made(torch.ones(4), group)
    for call, text in (
        (lambda: ops.one_shot_all_reduce(plain, "sum", group), "not in symmetric memory"),
        (lambda: ops.one_shot_all_reduce(x, "max", group), '"sum" only'),
        (lambda: ops.nvshmem_put(x, 99), "rank 99 of a group"),
        (lambda: ops.memset32_(x, 0, 1, 1), "uint32"),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()
    # Other sizes on other ranks: all hear of it, and go on.
    odd = symm_mem.empty(4 + 1024 * me, device="cpu")
    with pytest.raises(RuntimeError, match="bytes with a pad of"):
        symm_mem.rendezvous(odd, group)


def check_no_rows(me, n, group):
    """Rank 1 sends nothing and has an input without rows, but receives like the others."""
    rows, _ = made(torch.arange(3.0 * n).view(n, 3) + 100 * me, group)
    x = rows[: 0 if me == 1 else n]
    sent = torch.full((n,), int(me != 1))
    splits, _ = made(sent, group)
    places, _ = made(torch.stack([sent, torch.arange(n)]), group)
    out, there = torch.empty(n, 3), torch.empty(2, n, dtype=torch.int64)
    wanted = torch.stack([torch.arange(3.0) + 3 * me + 100 * p for p in range(n) if p != 1])
    for call in (
        lambda: ops.all_to_all_vdev(x, out, splits, there, group),
        lambda: ops.all_to_all_vdev_2d(x, out, splits, there, group, 1),
        lambda: ops.all_to_all_vdev_2d_offset(x, out, places, there, group),
    ):
        out.fill_(FILL)
        call()
        assert torch.equal(out[:-1], wanted)
        assert (out[-1] == FILL).all()


def check_dtypes(me, n, group):
    unsigned = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
    signed = [torch.int8, torch.int16, torch.int32, torch.int64]
    floating = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float64]
    for dtype in (torch.bool, torch.complex32, torch.complex64, *unsigned, *signed, *floating):
        lowest = -2 if dtype in unsigned else 0  # which becomes the largest but one, so that sums wrap
        values = torch.arange(lowest, lowest + 2 * n).view(n, 2)
        data = torch.stack([values + p for p in range(n)])
        total = data.sum(0).to(dtype).tolist()
        x, _ = made(data[me].to(dtype), group)
        assert ops.one_shot_all_reduce(x, "sum", group).tolist() == total, dtype
        out, part = torch.empty_like(x), torch.empty(1, 2, dtype=dtype)
        ops.reduce_scatter_out(x, group, False, part)
        assert part.tolist() == total[me : me + 1]
        ops.multimem_one_shot_reduce_out(x, "sum", 1, group, out)
        assert me != 1 or out.tolist() == total
        if dtype in floating:
            ops.tile_reduce(x, out.zero_(), n - 1, group, "sum")
            assert me != n - 1 or out.tolist() == total
        ops.two_shot_all_reduce_(x, "sum", group)
        assert x.tolist() == total


def check_tiles_apart(me, n, group):
    """Tiles in memory of their own, whose first rendezvous is the operation itself."""
    tiles = [symm_mem.empty((2, 2), device="cpu").fill_(10 * i + me) for i in range(n)]
    out = torch.zeros(2, 2)
    ops.multi_root_tile_reduce(tiles, out, list(range(n)), group, "sum")
    assert (out == n * 10 * me + sum(range(n))).all()


def check_pads(me, n, group):
    """A tensor and a pad that have met in other groups, where a number means two ranks."""
    part = dist.new_group(list(range(1, n)))
    x, handle = made(torch.full((4,), float(me)), group)
    if me:
        pad, _ = made(torch.zeros(1, dtype=torch.int64), part.group_name)
        for peer in (n - 1, 1, -1, 2**32):  # the pad has no rank n - 1
            with pytest.raises(RuntimeError, match="group of ranks"):
                ops.nvshmem_put_with_signal(x, pad, 7, peer)
    both, pads = made(torch.zeros(1, dtype=torch.int64), group)
    for peer in (n, -1, 2**32):
        with pytest.raises(RuntimeError, match=f"rank {peer} of a group of {n}"):
            ops.nvshmem_put_with_signal(x, both, 7, peer)
    handle.barrier()
    assert (x == me).all()
    assert not both.any()
    assert not me or not pad.any()
    pads.barrier()


def check_outs(me, n, group):
    """An error that rank 1 alone has is raised by all, and the next operation finds them in step."""
    x, _ = made(torch.full((n, n), me + 1.0), group)
    whole, _ = made(torch.zeros(n, n), group)
    splits, _ = made(torch.ones(n, dtype=torch.int64), group)
    packed = symm_mem.empty((2, 2), dtype=torch.float4_e2m1fn_x2, device="cpu")  # torch cannot sum it
    there = torch.zeros(2, n, dtype=torch.int64)
    out, row = torch.zeros(n, n), torch.zeros(1, n)
    if me == 1:
        out, row, whole = out[1:], row[:, 1:], whole[1:]
    calls = [
        lambda: ops.one_shot_all_reduce_out(x, "sum", group, out),
        lambda: ops.two_shot_all_reduce_out(x, "sum", group, out),
        lambda: ops.reduce_scatter_out(x, group, False, row),
        lambda: ops.multimem_one_shot_reduce_out(x, "sum", 1, group, out),
        lambda: ops.multimem_one_shot_reduce_out(packed, "sum", 1, group, torch.empty_like(packed)),
        lambda: ops.multimem_all_gather_out(x[:1].contiguous(), group, whole),
        lambda: ops.nvshmem_all_to_all(x, out, group),
        lambda: ops.tile_reduce(x, out, 1, group, "sum"),
        lambda: ops.all_to_all_vdev(x, row, splits, there, group),
    ]
    if hasattr(ops, "nccl_reduce_scatter_offset"):
        calls.append(lambda: ops.nccl_reduce_scatter_offset(x, [row], group, 0, None, None, "sum"))
    if hasattr(ops, "nccl_all_to_all_nd"):
        calls.append(lambda: ops.nccl_all_to_all_nd(x, out, 1, 0, group))
    for number, call in enumerate(calls):
        text = "input|out|copy_kernel|tiles" if me == 1 else "rank 1 could not do its part"
        with pytest.raises(RuntimeError, match=text):
            call()
        assert (x == me + 1).all()
        x.fill_(number)
        assert (ops.one_shot_all_reduce(x, "sum", group) == n * number).all()
        x.fill_(me + 1)
    assert not any(t.any() for t in (out, row, whole, there))


CHECKS = {
    "rows": check_no_rows,
    "dtypes": check_dtypes,
    "tiles": check_tiles_apart,
    "pads": check_pads,
    "outs": check_outs,
}


def check_second_job(me, n, group):
    """Memory that outlives its group meets in the next one, where the ranks stand in reverse."""
    x, _ = made(torch.full((2,), float(me)), group)
    if not torch.accelerator.is_available():
        symm_mem.get_symm_mem_workspace(group, 64)
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if me == n - 1 else None
    port = [server.port if server else 0]
    dist.broadcast_object_list(port, src=n - 1)
    store = server or dist.TCPStore("127.0.0.1", port[0])
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="has met in 0 groups"):
        ops.nvshmem_put(x, 0)
    me = n - 1 - me
    dist.init_process_group("gloo", store=store, rank=me, world_size=n)
    assert dist.group.WORLD.group_name == group
    with pytest.raises(RuntimeError, match="has met in 0 groups"):
        ops.nvshmem_put(x, 0)
    x.fill_(me)
    assert ops.nvshmem_broadcast(x, n - 1, group).tolist() == [n - 1] * 2
    assert symm_mem.rendezvous(x, group).rank == me
    ops.nvshmem_get(x[:1], n - 1)
    if not torch.accelerator.is_available():
        handle = symm_mem.get_symm_mem_workspace(group, 16)
        assert (handle.rank, handle.buffer_size) == (me, 16)
    symm_mem.rendezvous(x, group).barrier()  # the last rendezvous needs the store of a process that may leave


rank, size = dist.get_rank(), dist.get_world_size()
world = dist.group.WORLD.group_name
if HOW == "all":
    evens = dist.new_group(list(range(0, size, 2)))
    parts = [(rank, size, world)]
    if rank % 2 == 0:
        parts.append((rank // 2, (size + 1) // 2, evens.group_name))
    for part in parts:
        check_handle(*part)
        if not torch.accelerator.is_available():
            check_workspace(*part)
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            check_reductions(*part, dtype)
        check_tiles(*part)
        check_one_sided(*part)
        for count in (1, 2):
            check_experts(*part, count)
        check_errors(part[0], part[2])
    check_in_python(rank, size, world)
    # One tensor in two groups.
    both, handle = made(torch.full((2,), float(rank)), world)
    if rank % 2 == 0:
        assert ops.one_shot_all_reduce(both, "sum", evens.group_name)[0].item() == sum(range(0, size, 2))
    assert ops.one_shot_all_reduce(both, "sum", world)[0].item() == sum(range(size))
    say("over")
    del both, handle
    symm_mem._group_name_to_workspace_tensor.clear()
    gc.collect()
    held = [line for line in Path("/proc/self/maps").read_text().splitlines() if "torch-symmetric" in line]
    say("left", mappings=len(held))
elif HOW in CHECKS:
    CHECKS[HOW](rank, size, world)
    say("over")
elif HOW == "again":
    check_second_job(rank, size, world)
    say("over")
elif HOW == "alone":
    if rank == 0:
        dist.distributed_c10d._get_process_group_store(dist.group.WORLD).set_timeout(timedelta(seconds=1))
        x = symm_mem.empty(4, device="cpu")
        with reporting():
            symm_mem.rendezvous(x, world)
    else:
        hear()
else:
    x, handle = made(torch.zeros(2), world)
    signals, _ = made(torch.zeros(2, dtype=torch.uint32), world)
    if rank == 0:
        try:
            handle.wait_signal(1, timeout_ms=100)
        except dist.DistBackendError as error:
            say("late", text=str(error))
        say("ready")
        try:
            handle.wait_signal(1)
        except dist.DistBackendError as error:
            say("lost", text=str(error))
        values = torch.ones(2, 2)
        for wait in (
            lambda: symm_mem.wait_signal(handle, 1),
            lambda: ops.nccl_wait_for_signal(x, 1),
            lambda: ops._async_input_mm(values, values, signals, 0),
        ):
            try:
                wait()
            except dist.DistBackendError as error:
                say("left alone", text=str(error))
        sys.stdout.flush()
    else:
        say("late")
        say("ready")
        hear()
if HOW == "all":
    dist.destroy_process_group()
if BACKEND == "gloo":
    leave()
