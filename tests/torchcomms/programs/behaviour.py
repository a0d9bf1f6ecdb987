"""A program that uses torchcomms as its users do, and writes what it saw as JSON, a file for each rank.

Two ranks of torchrun. Arguments: a folder for its files.
"""

import dataclasses
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torchcomms
from torchcomms import ReduceOp, objcol
from torchcomms.device_mesh import _flatten_with_comm, init_device_mesh
from torchcomms.hooks import FlightRecorderHook, NanCheckHook, clog

CPU = torch.device("cpu")
SOON = timedelta(seconds=30)
folder = Path(sys.argv[1])
seen = {}


def section(function):
    seen[function.__name__] = function()
    return function


def raised(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, isinstance(error, RuntimeError)
    return "nothing", False


class Anything:
    """An object that only pickle can carry."""

    def __init__(self, value):
        self.value = value


comm = torchcomms.new_comm("gloo", CPU, "main", None, SOON, None, None, False, {"lazy": "1"})
rank, size = comm.get_rank(), comm.get_size()
other = 1 - rank


@section
def operations():
    """Every operation with positional arguments, and a hint and a timeout that mean nothing special."""
    more = (False, {"some": "hint"}, SOON)

    def t(*values):
        return torch.tensor(values, dtype=torch.float32)

    def many(n=2):
        return [torch.zeros(2) for _ in range(n)]

    mine = t(rank, rank + 1)
    found = {}

    def note(name, tensors, work):
        assert work.is_completed(), name
        assert work.wait() is None, name
        found[name] = [x.tolist() for x in ([tensors] if isinstance(tensors, torch.Tensor) else tensors)]

    x = mine.clone()
    note("broadcast", x, comm.broadcast(x, 1, *more))
    x = mine.clone()
    note("all_reduce", x, comm.all_reduce(x, ReduceOp.SUM, *more))
    x = mine.clone()
    note("reduce", x, comm.reduce(x, 0, ReduceOp.MAX, *more))
    xs = many()
    note("all_gather", xs, comm.all_gather(xs, mine, *more))
    xs = [torch.zeros(1), torch.zeros(2)]
    note("all_gather_v", xs, comm.all_gather_v(xs, mine[: rank + 1], *more))
    x = torch.zeros(4)
    note("all_gather_single", x, comm.all_gather_single(x, mine, *more))
    x = torch.zeros(2)
    note("reduce_scatter", x, comm.reduce_scatter(x, [mine, mine], ReduceOp.AVG, *more))
    x = torch.zeros(rank + 1)
    note("reduce_scatter_v", x, comm.reduce_scatter_v(x, [mine[:1], mine], ReduceOp.SUM, *more))
    x = torch.zeros(1)
    note("reduce_scatter_single", x, comm.reduce_scatter_single(x, mine, ReduceOp.SUM, *more))
    x = torch.zeros(2)
    note("all_to_all_single", x, comm.all_to_all_single(x, mine, *more))
    x = torch.zeros(2)
    note("all_to_all_v_single", x, comm.all_to_all_v_single(x, mine, [1, 1], [1, 1], *more))
    xs = many()
    note("all_to_all", xs, comm.all_to_all(xs, [mine, mine + 10], *more))
    comm.barrier(*more)
    x = torch.zeros(2)
    note("scatter", x, comm.scatter(x, [mine, mine + 1] if rank == 0 else [], 0, *more))
    xs = many() if rank == 0 else []
    note("gather", xs, comm.gather(xs, mine, 0, *more))
    x = torch.zeros(4) if rank == 0 else None
    note("gather_single", [] if x is None else x, comm.gather_single(x, mine, 0, *more))
    x = mine.clone()
    (comm.send if rank == 0 else comm.recv)(x, other, *more)
    found["send"] = x.tolist()
    handle = comm.all_gather_p_init(x := torch.zeros(4), {"some": "hint"}, SOON)
    note("all_gather_p", x, comm.all_gather_p_exec(handle, mine, *more))
    comm.all_gather_p_free(handle)
    work = comm.all_reduce(mine, ReduceOp.PREMUL_SUM(2.0), True)
    work.wait_blocking()
    found["async"] = mine.tolist()
    found["missing async_op"] = raised(comm.all_reduce, mine, ReduceOp.SUM)
    found["wrong hints"] = raised(comm.all_reduce, mine, ReduceOp.SUM, False, {1: 2})
    return found


@section
def hooks():
    """What hooks receive, by operation."""
    before, after = [], []

    def plain(value):
        if isinstance(value, torch.Tensor):
            return list(value.shape)
        return [plain(v) for v in value] if isinstance(value, list) else value

    def pre(name, op_id, args):
        fields = dataclasses.asdict(args) if dataclasses.is_dataclass(args) else {}
        before.append((str(name), op_id, type(args).__name__, {k: plain(v) for k, v in fields.items()}))

    def post(op_id, args):
        after.append((op_id, type(args).__name__))

    kid = comm.split([0, 1], "hooked")
    handles = [kid.register_pre_hook(pre), kid.register_post_hook(post)]
    x = torch.ones(2)
    kid.all_reduce(x, ReduceOp.SUM, False)
    kid.all_gather([torch.zeros(2), torch.zeros(2)], x, False)
    kid.reduce_scatter_single(torch.zeros(1), x, ReduceOp.SUM, True).wait()
    kid.all_to_all_v_single(torch.zeros(2), x, [1, 1], [1, 1], False)
    kid.gather_single(torch.zeros(4) if rank == 0 else None, x, 0, False)
    kid.barrier(False)
    (kid.send if rank == 0 else kid.recv)(x, other, False)
    batch = kid.batch_op_create()
    batch.send(x, other)
    batch.recv(torch.zeros(2), other)
    batch.issue(False)
    kid.split([rank], "alone").finalize()
    kid.split([], "nobody")
    for handle in handles:
        handle.remove()
    kid.all_reduce(x, ReduceOp.SUM, False)

    def refuse(name, op_id, args):
        raise ValueError("no")

    handle = kid.register_pre_hook(refuse)
    refused = raised(kid.all_reduce, x, ReduceOp.SUM, False)
    handle.remove()
    last = []
    kid.register_pre_hook(lambda *args: last.append((str(args[0]), args[1], type(args[2]).__name__)))
    kid.finalize()
    return {"before": before, "after": after, "refused": refused, "last": last}


@section
def batches():
    batch = comm.batch_op_create()
    x, y = torch.full((2,), float(rank)), torch.zeros(2)
    kept = (batch.send(x, other), batch.recv(y, other))
    options = torchcomms.BatchP2POptions()
    options.timeout, options.hints = SOON, {"some": "hint"}
    batch.issue(True, options).wait()
    first = y.tolist()
    x += 10
    batch.issue(False)
    batch.ops = [torchcomms.P2POp(torchcomms.P2POpType.SEND, x + 10, other), batch.ops[1]]
    second = y.tolist()
    batch.issue(False)
    empty = raised(comm.batch_op_create().issue, False)
    return {"returns": kept, "first": first, "second": second, "third": y.tolist(), "empty": empty}


@section
def splits():
    turned = comm.split([1, 0], "turned", {}, SOON)
    some = comm.split([0], "zero") if rank == 0 else comm.split([], "zero")
    again = comm.split([0, 1], "again")  # after a split of some ranks, at which torchcomms' gloo hangs
    x = torch.tensor([float(turned.get_rank())])
    turned.broadcast(x, 0, False)
    said = [turned.get_rank(), x.item(), turned.get_name(), type(turned).__name__, some is None]
    timeouts = [c.get_options().timeout.total_seconds() for c in (comm, again)]
    wrong = raised(comm.split, [other], "wrong")
    for c in (turned, again, *([some] if some else [])):
        c.finalize()
    return said, timeouts, wrong


@section
def windows():
    from torchcomms import TorchCommWinAccessType as Access

    import unicomm.symm  # memory of windows is the one thing that is not torchcomms' on the CPU

    unicomm.symm.init(comm)
    memory = unicomm.symm.empty(4, comm=comm)
    memory.zero_()
    opened = []
    handle = comm.register_pre_hook(lambda name, op_id, args: opened.append(type(args).__name__))
    window = comm.new_window(memory)
    handle.remove()
    comm.barrier(False)
    window.put(torch.full((2,), rank + 1.0), other, 2 * rank, False)
    window.signal(other, False, {"some": "hint"})
    window.wait_signal(other, False, None, SOON)
    said = {
        "hook": opened,
        "memory": memory.tolist(),
        "is": [str(window.dtype), window.shape, str(window.device), window.get_size()],
        "attr": window.get_attr(other).access_type is Access.WIN_ACCESS_TYPE_UNIFIED,
        "theirs": window.map_remote_tensor(other).tolist(),
        "device window": raised(window.get_device_window),
        "transport": raised(comm.get_device_transport),
    }
    comm.barrier(False)
    window.tensor_deregister()
    window.free()
    return said


@section
def objects():
    everyone = [None, None]
    objcol.all_gather_object(comm, everyone, {"rank": rank}, SOON)
    gathered = [None, None] if rank == 1 else None
    objcol.gather_object(comm, rank, 1, gathered, timeout=SOON)
    sent = [1, "two"] if rank == 0 else [None, None]
    objcol.broadcast_object_list(comm, sent, 0)
    mine = [None]
    objcol.scatter_object_list(comm, 0, mine, ["a", "b"] if rank == 0 else None)
    if rank == 0:
        objcol.send_object_list(comm, [Anything(5)], 1, SOON)
        got = 5
    else:
        received = [None]
        objcol.recv_object_list(comm, received, 0, weights_only=False)
        got = received[0].value
    unsafe = raised(objcol.broadcast_object_list, comm, [Anything(5)], rank) if size == 1 else None
    if rank == 0:
        objcol.send_object_list(comm, [Anything(5)], 1)
    else:
        unsafe = raised(objcol.recv_object_list, comm, [None], 0)
    return everyone, gathered, sent, mine, got, unsafe


@section
def logs():
    lines = {}
    for name, events, verbose in (("all", ["ALL"], ["buffers"]), ("begins", ["NONE"], [])):
        path = folder / f"clog-{name}-{rank}"
        path.write_text("old\n")
        log = clog(str(path), events, verbose)
        kid = comm.split([0, 1], f"log {name}")
        log.register_with_comm(kid)
        twice = raised(log.register_with_comm, kid)
        kid.all_reduce(torch.ones(1024), ReduceOp.SUM, False)
        kid.all_reduce(torch.ones(1024), ReduceOp.SUM, False)
        grand = kid.split([0, 1], "grand")
        grand.barrier(False)
        log.flush()
        lines[name] = path.read_text().splitlines()
        grand.finalize()
        kid.finalize()
        log.close()
    unknown = raised(clog, output=str(folder / f"clog-{rank}"), events=["EVERYTHING"])
    return lines, twice, unknown


@section
def nans():
    found = {}
    for kind in ("inputs", "outputs"):
        check = NanCheckHook(check_inputs=kind == "inputs", check_outputs=kind == "outputs")
        enabled = check.is_enabled()
        kid = comm.split([0, 1], f"nan {kind}")
        check.register_with_comm(kid)
        kid.all_reduce(torch.ones(2), ReduceOp.SUM, False)
        kid.all_gather_single(torch.full((4,), float("nan")), torch.ones(2), False)  # only written
        bad = torch.tensor([1.0, float("nan")])
        if kind == "inputs":
            result = raised(kid.all_reduce, bad, ReduceOp.SUM, False)
        else:
            result = raised(kid.broadcast, bad if rank == 0 else torch.ones(2), 0, False)
        found[kind] = [enabled, check.is_enabled(), result]
        kid.finalize()
    return found


@section
def recorder():
    apart = FlightRecorderHook(isolated=True)
    hook = FlightRecorderHook(max_entries=3, isolated=True)
    before = [hook.is_enabled(), len(hook), json.loads(hook.dump_json())["entries"]]
    kid = comm.split([0, 1], "recorded")
    hook.register_with_comm(kid)
    hook.register_with_comm(kid)
    comm.barrier(False)  # not registered
    for _ in range(2):
        kid.all_reduce(torch.ones(3), ReduceOp.SUM, False)
    grand = kid.split([0, 1], "grand recorded")
    grand.barrier(False)
    dump = json.loads(hook.dump_json())
    names = [e["profiling_name"].split(":")[-1] for e in dump["entries"]]
    kid.barrier(False)
    most = hook.size()
    path = hook.dump_file(rank, False)
    unfinished = json.loads(hook.dump_json(include_completed=False))["entries"]
    hook.reset()
    after = hook.size()
    for c in (grand, kid):
        c.finalize()
    return {
        "before": before,
        "enabled": [hook.is_enabled(), apart.is_enabled()],
        "names": names,
        "states": [e["state"] for e in dump["entries"]],
        "most": most,
        "file": Path(path).exists(),
        "unfinished": unfinished,
        "after reset": after,
    }


@section
def meshes():
    rows = [comm.split([0, 1], "dp"), comm.split([rank], "tp")]
    mesh = init_device_mesh((rows[0], rows[1]), ("dp", "tp"), comm)
    group = mesh.get_group("dp")
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    flat_comm = comm.split([0, 1], "dp_tp")
    _flatten_with_comm(mesh, "dp_tp", flat_comm, [0, 1], mesh._layout)
    flat = mesh["dp_tp"]
    y = torch.ones(2)
    dist.all_reduce(y, group=flat.get_group())
    said = [group.group_name, x.tolist(), flat.get_group().group_name, flat.size(), flat.get_rank()]
    dist.destroy_process_group()
    return [*said, y.tolist()]


main = torchcomms.new_comm("gloo", CPU, name="second", hints={"persistent_store": "true"})


@section
def memory():
    x = main.get_mem_allocator().empty(3)
    y = torchcomms.get_mem_allocator("gloo").empty(3)
    x.fill_(1)
    main.all_reduce(x, op=ReduceOp.SUM, async_op=False)
    return [x.tolist(), y.numel(), main.get_backend(), type(main.get_backend_impl()).__name__]


@section
def ends():
    called = []
    main.register_abort_hook(lambda: called.append("abort hook"))
    supported = main.is_abort_supported(), main.is_aborted()
    main.abort()
    late = raised(main.barrier, False)
    main.finalize()
    main.finalize()
    unknown = (
        raised(torchcomms.new_comm, "nothing", CPU, "x"),
        raised(torchcomms.new_comm, "gloo", CPU, "x", hints={"typo": "1"}),
    )
    return called, supported, main.is_aborted(), late, unknown


(folder / f"seen-{rank}.json").write_text(json.dumps(seen))
