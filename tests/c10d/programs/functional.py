"""Custom operators that take groups, compiled whole: prints one line of JSON a rank.

The groups are inputs of the graph: another group of the same size runs the same code, without recompiling.
"""

import datetime
import faulthandler
import json
import traceback

import torch
import torch.distributed as dist

import unicomm

faulthandler.dump_traceback_later(100, exit=True)
results = {}


def check(name):
    def run(f):
        try:
            f()
            results[name] = "ok"
        except Exception as error:
            traceback.print_exc()
            results[name] = f"{type(error).__name__}: {str(error)[:300]}"

    return run


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
me, n = dist.get_rank(), dist.get_world_size()
F, ops = unicomm.functional, torch.ops.unicomm
everyone = [torch.arange(4.0) + r for r in range(n)]


def of_unicomm(x, group):
    y = ops.all_reduce(x * 2, "sum", group)
    z = ops.all_gather_single(y, group)
    w = F.reduce_scatter_single(z, "avg", group)
    return w + ops.permute(x, list(range(1, n)) + [0], group)


def expected(group_sum):
    return 2 * group_sum + everyone[me - 1]


@torch.library.custom_op("own::scaled_sum", mutates_args=())
def scaled_sum(x: torch.Tensor, factor: float, group: dist.ProcessGroup) -> torch.Tensor:
    out = x.clone()
    F.communicator(group, x.device).all_reduce(out, unicomm.ReduceOp.PREMUL_SUM(factor), False)
    return out


scaled_sum.register_fake(lambda x, factor, group: torch.empty_like(x))

for kind in ("aot_eager", "inductor"):
    for group_kind in ("process group", "communicator"):

        @check(f"{kind}, {group_kind}")
        def _(kind=kind, group_kind=group_kind):
            first, second = dist.group.WORLD, dist.new_group()
            if group_kind == "communicator":
                first, second = first.get_comm(), second.get_comm()
            torch._dynamo.reset()
            compiled = torch.compile(of_unicomm, fullgraph=True, backend=kind)
            counts = torch._dynamo.utils.counters["stats"]
            x = everyone[me].clone().requires_grad_()
            eager = everyone[me].clone().requires_grad_()
            y, z = compiled(x, first), of_unicomm(eager, first)
            torch.testing.assert_close(y, expected(sum(everyone)))
            torch.testing.assert_close(y, z)
            y.sum().backward()
            z.sum().backward()
            torch.testing.assert_close(x.grad, eager.grad)
            graphs = counts["unique_graphs"]
            torch.testing.assert_close(compiled(x, second), y)
            assert counts["unique_graphs"] == graphs, "compiled again for another group"

    @check(f"{kind}, own operator")
    def _(kind=kind):
        f = torch.compile(lambda x, group: scaled_sum(x, 0.5, group) + 1, fullgraph=True, backend=kind)
        torch.testing.assert_close(f(everyone[me], dist.group.WORLD), sum(everyone) / 2 + 1)

    @check(f"{kind}, _c10d_functional by object and by name")
    def _(kind=kind):
        native = torch.ops._c10d_functional

        def f(x, group):
            return native.wait_tensor(native.all_reduce(x, "sum", group))

        world = dist.group.WORLD
        torch.testing.assert_close(f(everyone[me], world), sum(everyone))
        torch.testing.assert_close(f(everyone[me], world.group_name), sum(everyone))
        named = torch.compile(lambda x: f(x, world.group_name), fullgraph=True, backend=kind)
        torch.testing.assert_close(named(everyone[me]), sum(everyone))
        compiled = torch.compile(f, fullgraph=True, backend=kind)
        torch.testing.assert_close(compiled(everyone[me], world), sum(everyone))


dist.destroy_process_group()
print(json.dumps({"results": results}), flush=True)
