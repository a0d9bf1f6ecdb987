"""Asynchronous functions, gather, scatter, messages and methods, compiled whole by Inductor on two ranks.

Prints one line of JSON a rank. Each check compares with the same function run eagerly, and with the numbers
that it must give.
"""

import datetime
import faulthandler
import json
import traceback

import torch
import torch._inductor.config as inductor
import torch.distributed as dist

import unicomm

faulthandler.dump_traceback_later(150, exit=True)
results = {}
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
me, n = dist.get_rank(), dist.get_world_size()
F = unicomm.functional
everyone = [torch.arange(8.0).reshape(4, 2) + 10 * r for r in range(n)]
total = sum(everyone)


def asynchronous(x, group):
    y = F.all_reduce_async(x * 2, "avg", group)
    z = F.all_gather_single_async(x, group)
    w = torch.mm(x, x.T).relu()
    v = F.reduce_scatter_single_async(z, "sum", group)
    splits = [3, 1] if me == 0 else [1, 3]
    u = F.all_to_all_v_single_async(F.all_to_all_single_async(x, group), splits, splits, group)
    return y + v + w.sum() + F.broadcast_async(u, 1, group)


def from_root(x, group):
    whole = F.gather(x, 1, group)
    if me == 1:
        whole = whole.flip(0)
    return F.scatter(whole, 1, x.shape[0], group) * (me + 1)


def messages(x, group):
    if me == 0:
        F.send(x * 2, 1, group)
        return F.recv(x, 1, group) + 1
    y = F.recv(x, 0, group)
    F.send(y + x, 0, group)
    return y


def methods(x, group):
    comm = group if isinstance(group, unicomm.Communicator) else world_comm
    y = x * 1
    comm.all_reduce(y, unicomm.ReduceOp.SUM, async_op=True).wait()
    z = x.new_zeros(n * x.shape[0], *x.shape[1:])
    comm.all_gather_single(z, y, async_op=False)
    comm.barrier()
    return z


def check(name, function, group, expected=None, gradients=True):
    try:
        torch._dynamo.reset()
        x = everyone[me].clone().requires_grad_(gradients)
        eager = everyone[me].clone().requires_grad_(gradients)
        y, z = torch.compile(function, fullgraph=True)(x, group), function(eager, group)
        torch.testing.assert_close(y, z * 1)
        if expected is not None:
            torch.testing.assert_close(y.detach(), expected)
        if gradients:
            (y * y).sum().backward()
            (z * z).sum().backward()
            torch.testing.assert_close(x.grad, eager.grad)
            assert x.grad.abs().sum() > 0
        results[name] = "ok"
    except Exception as error:
        traceback.print_exc()
        results[name] = f"{type(error).__name__}: {str(error)[:300]}"


world = dist.group.WORLD
world_comm = world.get_comm()
inductor.reorder_for_compute_comm_overlap = True
inductor.reorder_for_compute_comm_overlap_passes = ["sink_waits"]
turned = torch.cat(everyone).flip(0)
for kind, group in (("process group", world), ("communicator", world_comm)):
    check(f"asynchronous, {kind}", asynchronous, group)
    check(f"gather and scatter, {kind}", from_root, group, turned[4 * me : 4 * me + 4] * (me + 1))
    said = 2 * everyone[0] + everyone[1] + 1 if me == 0 else 2 * everyone[0]
    check(f"messages, {kind}", messages, group, said, gradients=False)
check("methods", methods, world_comm, torch.cat([total] * n), gradients=False)

dist.destroy_process_group()
print(json.dumps({"results": results}), flush=True)
