"""One rank of cpu_collectives.py: runs the commands that the driver sends over a socket.

A group of ranks holds one or several contenders. A command is a line of JSON:
    {"do": "prepare", "contender", "operation", "dtype", "bytes"}   makes the tensors, checks one result
    {"do": "time", "times"}                                         seconds of one call, on this rank
    {"do": "wait", "seconds"}                                       CPU seconds while the last rank is late
    {"do": "end"}
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], object]
Empty = Callable[..., torch.Tensor]
Maker = Callable[[str, "Tensors"], Call | None]
DTYPES = {n: getattr(torch, n) for n in ("float32", "bfloat16", "float16", "int32")}


class Tensors:
    """What an operation works on. `own` has the given bytes; `whole` has that of all ranks."""

    def __init__(
        self, operation: str, dtype: torch.dtype, nbytes: int, size: int, empty: Empty = torch.empty
    ) -> None:
        count = max(1, nbytes // dtype.itemsize)
        self.own = empty(count, dtype=dtype).fill_(1)
        many = operation in ("all_gather", "reduce_scatter", "all_to_all")
        self.whole = empty(count * size if many else 1, dtype=dtype).fill_(1)
        self.other = empty(count * size if operation == "all_to_all" else 1, dtype=dtype).fill_(1)

    def check(self, operation: str, rank: int, size: int, run: Call) -> None:
        """One call whose result is known."""
        self.own.fill_(rank + 1)
        self.whole.fill_(rank + 1)
        self.other.fill_(rank + 1)
        run()
        total = size * (size + 1) // 2
        everyone = torch.arange(1, size + 1, dtype=self.own.dtype)
        good = {
            "all_reduce": lambda: bool((self.own == total).all()),
            "all_gather": lambda: torch.equal(self.whole, everyone.repeat_interleave(self.own.numel())),
            "reduce_scatter": lambda: bool((self.own == total).all()),
            "all_to_all": lambda: torch.equal(self.whole, everyone.repeat_interleave(self.own.numel())),
            "broadcast": lambda: bool((self.own == 1).all()),
        }.get(operation, lambda: True)
        if not good():
            raise SystemExit(f"rank {rank}: wrong result of {operation}")
        for tensor in (self.own, self.whole, self.other):
            tensor.zero_()


def communicator(comm: Any) -> Maker:
    """unicomm's own interface."""
    import unicomm

    add, me, size = unicomm.ReduceOp.SUM, comm.get_rank(), comm.get_size()

    def ping_pong(t: Tensors) -> None:
        if me == 0:
            comm.send(t.own, 1)
            comm.recv(t.own, 1)
        elif me == 1:
            comm.recv(t.own, 0)
            comm.send(t.own, 0)

    return lambda operation, t: (
        {
            "all_reduce": lambda: comm.all_reduce(t.own, add),
            "all_gather": lambda: comm.all_gather_single(t.whole, t.own),
            "reduce_scatter": lambda: comm.reduce_scatter_single(t.own, t.whole, add),
            "all_to_all": lambda: comm.all_to_all_single(t.whole, t.other),
            "broadcast": lambda: comm.broadcast(t.own, 0),
            "barrier": lambda: comm.barrier(),  # noqa: PLW0108  a method that was looked up before is slower
            "ping_pong": lambda: ping_pong(t),
        }[operation]
        if size > 1 or operation != "ping_pong"
        else None
    )


def process_group(group: Any) -> Maker:
    """torch.distributed, on whatever group."""
    import torch.distributed as dist

    me = dist.get_rank(group)

    def ping_pong(t: Tensors) -> None:
        if me == 0:
            dist.send(t.own, 1, group)
            dist.recv(t.own, 1, group)
        elif me == 1:
            dist.recv(t.own, 0, group)
            dist.send(t.own, 0, group)

    return lambda operation, t: {
        "all_reduce": lambda: dist.all_reduce(t.own, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(t.whole, t.own, group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(t.own, t.whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(t.whole, t.other, group=group),
        "broadcast": lambda: dist.broadcast(t.own, 0, group),
        "barrier": lambda: dist.barrier(group),
        "ping_pong": lambda: ping_pong(t),
    }[operation]


def mpi(comm: Any) -> Maker:
    """mpi4py on numpy arrays over the tensors' memory: with torch tensors a call takes 3 to 7 us more."""
    from mpi4py import MPI

    me = comm.rank

    def call(operation: str, t: Tensors) -> Call | None:
        if t.own.dtype in (torch.bfloat16, torch.float16):
            return None  # MPI has no such types
        own, whole, other = t.own.numpy(), t.whole.numpy(), t.other.numpy()

        def ping_pong() -> None:
            if me == 0:
                comm.Send(own, 1)
                comm.Recv(own, 1)
            elif me == 1:
                comm.Recv(own, 0)
                comm.Send(own, 0)

        return {
            "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, own),
            "all_gather": lambda: comm.Allgather(own, whole),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(whole, own),
            "all_to_all": lambda: comm.Alltoall(other, whole),
            "broadcast": lambda: comm.Bcast(own, 0),
            "barrier": lambda: comm.Barrier(),  # noqa: PLW0108  as unicomm
            "ping_pong": ping_pong,
        }[operation]

    return call


def contenders(group: str) -> tuple[int, int, dict[str, tuple[Maker, Empty]]]:
    if group not in ("torch", "hosts"):
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        return comm.rank, comm.size, {group: (mpi(comm), torch.empty)}
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ours = dist.new_group(backend="unicomm")
    comm = ours.get_comm()
    if group == "hosts":
        import unicomm
        from unicomm.backends.ucx import library as ucx

        interface = {"interface": os.environ["BENCH_INTERFACE"]}
        flat = unicomm.new_comm("gloo", "cpu", name="flat", hints=interface)
        table = {"unicomm": (communicator(comm), torch.empty)}
        for between in ("gloo",) if ucx.why_not() else ("ucx", "gloo"):
            hints = interface | {"between": between}
            other = unicomm.new_comm("auto", "cpu", name=f"by {between}", hints=hints)
            table[f"unicomm, {between}"] = (communicator(other), torch.empty)
        table |= {
            "unicomm, flat": (communicator(flat), torch.empty),
            "Gloo": (process_group(dist.group.WORLD), torch.empty),
        }
        return dist.get_rank(), dist.get_world_size(), table
    table = {
        "unicomm": (communicator(comm), torch.empty),
        "unicomm, its memory": (communicator(comm), comm.mem_allocator.empty),
        "unicomm, torch.distributed": (process_group(ours), torch.empty),
        "Gloo": (process_group(dist.group.WORLD), torch.empty),
    }
    return dist.get_rank(), dist.get_world_size(), table


def serve(
    group: str,
    rank: int,
    size: int,
    names: list[str],
    prepare: Callable[[dict[str, Any]], Call | None],
    barrier_of: Callable[[str], Call | None],
) -> None:
    """Does what the driver says until it says "end". `prepare` makes a case's call, or None where there is
    none, `barrier_of` that of a contender."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect(os.environ["BENCH_SOCKET"])
    stream = link.makefile("rw")

    def say(**what: Any) -> None:
        stream.write(json.dumps(what) + "\n")
        stream.flush()

    say(group=group, rank=rank, size=size, contenders=names)
    run: Call | None = None
    barrier: Call = lambda: None  # noqa: E731
    for line in stream:
        command = json.loads(line)
        if command["do"] == "end":
            break
        if command["do"] == "prepare":
            run = prepare(command)
            barrier = barrier_of(command["contender"]) or barrier
            say(able=run is not None)
        elif command["do"] == "wait":
            barrier()
            if rank == size - 1:
                time.sleep(command["seconds"])
            began = time.process_time()
            barrier()
            say(seconds=time.process_time() - began, late=rank == size - 1)
        else:
            assert run is not None
            barrier()
            began = time.perf_counter()
            for _ in range(command["times"]):
                run()
            say(seconds=(time.perf_counter() - began) / command["times"])
    os._exit(0)  # some MPIs wait for others in their exit handlers


def main() -> None:
    torch.set_num_threads(1)
    group = sys.argv[1]
    rank, size, table = contenders(group)

    def prepare(command: dict[str, Any]) -> Call | None:
        make, empty = table[command["contender"]]
        tensors = Tensors(command["operation"], DTYPES[command["dtype"]], command["bytes"], size, empty)
        run = make(command["operation"], tensors)
        if run is not None:
            tensors.check(command["operation"], rank, size, run)
        return run

    def barrier_of(contender: str) -> Call | None:
        return table[contender][0]("barrier", Tensors("barrier", torch.float32, 4, size))

    serve(group, rank, size, list(table), prepare, barrier_of)


if __name__ == "__main__":
    main()
