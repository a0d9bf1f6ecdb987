"""Collectives that C++ code calls and waits for, with sizes that differ: errors_in_cpp.py

Each rank prints "all raised" when no wait returned as if its collective had succeeded.
"""

import contextlib

import torch
import torch.distributed as dist

dist.init_process_group("unicomm")
rank, size = dist.get_rank(), dist.get_world_size()
ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name


def gather(n):
    out = torch.full((n * size,), -7.0)
    return ops.all_gather_into_tensor_out(torch.full((n,), float(rank)), size, name, out=out)


def scatter(n):
    out = torch.full((n,), -7.0)
    return ops.reduce_scatter_tensor_out(torch.ones(n * size), "sum", size, name, out=out)


FORMS = {
    "all_gather_into_tensor_out": gather,
    "reduce_scatter_tensor_out": scatter,
    "all_gather_into_tensor": lambda n: ops.all_gather_into_tensor(torch.ones(n), size, name),
    "reduce_scatter_tensor": lambda n: ops.reduce_scatter_tensor(torch.ones(n * size), "sum", size, name),
    "all_reduce": lambda n: ops.all_reduce(torch.ones(n), "sum", name),
    "all_reduce_": lambda n: ops.all_reduce_(torch.ones(n), "sum", name),
    "broadcast": lambda n: ops.broadcast(torch.ones(n), 0, name),
    "all_to_all_single": lambda n: ops.all_to_all_single(torch.ones(n * size), [n] * size, [n] * size, name),
}
for form, call in FORMS.items():
    found = None
    with contextlib.suppress(RuntimeError):
        found = ops.wait_tensor(call(3 + rank))
    assert found is None, f"{form} returned {found.tolist()[:8]}"
    right = ops.wait_tensor(call(3))
    assert (right != -7).all(), form
assert ops.wait_tensor(gather(2)).tolist() == [float(r) for r in range(size) for _ in range(2)]
print("all raised", flush=True)
dist.destroy_process_group()
