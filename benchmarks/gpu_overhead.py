"""The host's time per call: unicomm beside torch.distributed's own NCCL, one rank, 4 floats.

Without a GPU: this package's part of a call, for all_reduce step by step, and for each common operation.

    python -m benchmarks.gpu_overhead                # on a GPU; without one: unicomm's own part alone
    python -m benchmarks.gpu_overhead --own          # that part also on a machine with a GPU
    python -m benchmarks.gpu_overhead --json FILE    # writes the figures to FILE, too

A call is timed until it returns, when its work is on a stream. All kinds are measured in turn, with a wait
for the device between rounds; results are checked. Figures are medians over the rounds, and the ratio is the
median of the rounds' ratios. `--own` runs over a library, streams and events that do nothing, so only this
package's work is measured; its figure is the fastest round, which other load disturbed least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import unicomm
from unicomm.backends.nccl.backend import NcclBackend
from unicomm.backends.nccl.library import NCCL, Library
from unicomm.comms.execution.composed import completion
from unicomm.comms.execution.device.executor import StreamExecutor
from unicomm.comms.execution.issued import IssuedOperation
from unicomm.comms.streams import Streams

console = Console(width=None if sys.stdout.isatty() else 110)
SUM = unicomm.ReduceOp.SUM


# --- a library, streams and events that do nothing -----------------------------------------------------


class NoLibrary:
    """Answers each call with success, as the newest NCCL would."""

    version = 23203

    def functions(self) -> list[tuple[str, int, bool]]:
        return [(name, 0, True) for name in ("CommInitRankConfig", "CommFinalize", "AlltoAll", "Gather")]

    def unique_id(self) -> tuple[int, bytes]:
        return 0, bytes(128)

    def init(self, *_: Any) -> tuple[int, int]:
        return 0, 1

    def async_error(self, _: int) -> tuple[int, int]:
        return 0, 0

    def last_error(self, _: int) -> str:
        return ""

    def all_reduce(self, *_: Any) -> int:
        return 0

    end = abort = group_start = group_end = all_reduce
    broadcast = reduce = all_gather = reduce_scatter = all_to_all = gather = send = recv = all_reduce


class NoStreams(Streams):
    def current(self) -> int:
        return 0

    def new(self) -> int:
        return 1

    def handle(self, stream: int) -> int:
        return stream

    def use(self, stream: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self, stream: int) -> int:
        return 0

    def wait(self, stream: int, event: int) -> None:
        pass

    def is_over(self, event: int) -> bool:
        return True

    def elapsed(self, first: int, second: int) -> float:
        return 0.0

    def is_capturing(self) -> bool:
        return False


class OwnPart(NcclBackend):
    """The backend as it is, over those."""

    name = "own-part"
    capabilities = replace(NcclBackend.capabilities, device_types=frozenset({"cpu"}))
    opened = Library(NCCL, NoLibrary())
    opened._log_started = True  # there is no log to listen to

    @classmethod
    def library(cls) -> Library:
        return cls.opened

    @classmethod
    def device_streams(cls, device: torch.device) -> Streams:
        return NoStreams()

    @classmethod
    def fp8(cls, library: Library, device: torch.device) -> bool:
        return False


# --- measuring -----------------------------------------------------------------------------------------


def rounds_of(
    kinds: dict[str, Callable[[], Any]], rounds: int, calls: int, settle: Callable[[], None]
) -> dict[str, list[float]]:
    """Microseconds a call, by kind, for each round."""
    took: dict[str, list[float]] = {name: [] for name in kinds}
    for call in kinds.values():
        for _ in range(calls):
            call()
        settle()
    for turn in track(range(rounds), "rounds", console=console, transient=True):
        names = list(kinds)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            call = kinds[name]
            began = time.perf_counter()
            for _ in range(calls):
                call()
            took[name].append((time.perf_counter() - began) / calls * 1e6)
            settle()
    return took


def on_gpu(rounds: int, calls: int) -> dict[str, list[float]]:
    import torch.distributed as dist

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=device)
    backend = "rccl" if torch.version.hip else "nccl"
    comm = unicomm.new_comm(backend, device, rank=0, size=1, name="overhead")
    tensors = {
        name: torch.full((4,), 1.5, device=device)
        for name in ("torch", "unicomm", "torch, async", "unicomm, async")
    }
    kinds = {
        "torch": lambda: dist.all_reduce(tensors["torch"]),
        "unicomm": lambda: comm.all_reduce(tensors["unicomm"], SUM),
        "torch, async": lambda: dist.all_reduce(tensors["torch, async"], async_op=True),
        "unicomm, async": lambda: comm.all_reduce(tensors["unicomm, async"], SUM, async_op=True),
    }

    def settle() -> None:
        torch.cuda.synchronize(device)
        comm._engine.executor.drain(60)  # type: ignore[union-attr]

    took = rounds_of(kinds, rounds, calls, settle)
    for name, x in tensors.items():
        if x.tolist() != [1.5] * 4:
            raise SystemExit(f"{name}: wrong result {x.tolist()}")
    if comm._engine.fast.seq != 2 * calls * (rounds + 1):
        raise SystemExit("not every call of unicomm was an operation")
    comm.finalize()
    dist.destroy_process_group()
    return took


def own_part(rounds: int, calls: int) -> dict[str, list[float]]:
    unicomm.register_backend(OwnPart.name, OwnPart)
    comm = unicomm.new_comm(OwnPart.name, torch.device("cpu"), rank=0, size=1, name="overhead")
    x, engine = torch.ones(4), comm._engine
    member, executor = engine.member, engine.executor
    assert isinstance(executor, StreamExecutor)
    recorder = member.recorder
    call = engine.check.call("all_reduce", (x,), op=SUM)
    begin = (member.recorder_index, call.operation.code, 1, 1, [x], [x], call.red_code, -1, 0, 0, 1000, 0)
    kinds: dict[str, Callable[[], Any]] = {
        "a call": lambda: comm.all_reduce(x, SUM),
        "a call, async": lambda: comm.all_reduce(x, SUM, async_op=True),
        "a call the long way": lambda: comm.all_reduce(x, SUM, timeout=600),
        "the long way: arguments checked": lambda: engine.check.call("all_reduce", (x,), op=SUM),
        "the long way: record begun": lambda: recorder.begin(*begin, False),
        "the long way: backend, to the library's function": lambda: completion.run(engine.group, call),
        "the long way: streams, events, watchdog": lambda: executor._put(
            IssuedOperation("all_reduce", (), lambda: None, 600.0, async_op=False)
        ),
    }
    took = rounds_of(kinds, rounds, calls, lambda: executor.drain(60))
    comm.finalize()
    return took


def of_operations(rounds: int, calls: int) -> dict[str, list[float]]:
    """Each common operation by the communicator, the same the long way, and by the process group."""
    from torch._C._distributed_c10d import (
        AllgatherOptions,
        AllreduceOptions,
        AllToAllOptions,
        BarrierOptions,
        BroadcastOptions,
        ReduceScatterOptions,
    )

    from unicomm.c10d.process_group import UnicommProcessGroup
    from unicomm.testing import run_ranks

    took: dict[str, list[float]] = {}

    def program(comm: unicomm.Communicator) -> None:
        if comm.get_rank() == 1:  # the library does nothing, so no rank has to answer
            return
        group = UnicommProcessGroup(comm)
        x, out, part = torch.ones(4), torch.ones(8), torch.ones(4)
        n = comm.get_size()
        assert out.numel() == n * part.numel()
        options: dict[str, Any] = {
            "all_reduce": AllreduceOptions(),
            "all_gather_single": AllgatherOptions(),
            "reduce_scatter_single": ReduceScatterOptions(),
            "broadcast": BroadcastOptions(),
            "all_to_all_single": AllToAllOptions(),
            "barrier": BarrierOptions(),
        }
        for one in options.values():
            one.asyncOp = False
        options["barrier"].asyncOp = True  # who waits for a barrier waits for the device
        own: dict[str, Callable[..., Any]] = {
            "all_reduce": lambda **k: comm.all_reduce(x, SUM, **k),
            "all_gather_single": lambda **k: comm.all_gather_single(out, part, **k),
            "reduce_scatter_single": lambda **k: comm.reduce_scatter_single(part, out, SUM, **k),
            "broadcast": lambda **k: comm.broadcast(x, 0, **k),
            "all_to_all_single": lambda **k: comm.all_to_all_single(out, x8, **k),
            "barrier": lambda **k: comm.barrier(async_op=True, **k),
            "send": lambda **k: comm.send(x, 1, **k),
            "recv": lambda **k: comm.recv(x, 1, **k),
        }
        x8 = torch.ones(8)
        torchs: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: group.allreduce([x], options["all_reduce"]),
            "all_gather_single": lambda: group._allgather_base(out, part, options["all_gather_single"]),
            "reduce_scatter_single": lambda: group._reduce_scatter_base(
                part, out, options["reduce_scatter_single"]
            ),
            "broadcast": lambda: group.broadcast([x], options["broadcast"]),
            "all_to_all_single": lambda: group.alltoall_base(out, x8, [], [], options["all_to_all_single"]),
            "barrier": lambda: group.barrier(options["barrier"]),
            "send": lambda: group.send([x], 1, 0),
            "recv": lambda: group.recv([x], 1, 0),
        }
        kinds: dict[str, Callable[[], Any]] = {}
        for name, call in own.items():
            kinds[name] = call
            kinds[f"{name}, the long way"] = lambda call=call: call(timeout=600)
            kinds[f"{name}, process group"] = torchs[name]
        executor = comm._engine.executor
        took.update(rounds_of(kinds, rounds, calls, lambda: executor.drain(60)))

    run_ranks(program, 2, backend=OwnPart.name)
    return took


def show(title: str, took: dict[str, list[float]], beside: str = "") -> dict[str, dict[str, float]]:
    """`beside`: what ratios are to; else each one's own long way."""
    table = Table(title=title)
    for column in ("", "median, us", "smallest, us", f"ratio to {beside or 'the long way'}"):
        table.add_column(column, justify="left" if not column else "right")
    figures = {}
    for name, times in took.items():
        asynchronous = f"{beside}, async"
        other = took[
            asynchronous
            if name.endswith("async") and asynchronous in took
            else beside or f"{name.partition(',')[0]}, the long way"
        ]
        ratio = statistics.median(a / b for a, b in zip(times, other, strict=True))
        figures[name] = {"median": statistics.median(times), "smallest": min(times), "ratio": ratio}
        table.add_row(name, *(f"{value:.2f}" for value in figures[name].values()))
    console.print(table)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--own", action="store_true", help="only what this package does in a call")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=200, help="in a round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    told: dict[str, Any] = {"torch": torch.__version__}
    if torch.cuda.is_available() and not options.own:
        told["gpu"] = torch.cuda.get_device_name(0)
        title = f"all_reduce of 4 floats, one rank, {told['gpu']}"
        told["calls"] = show(title, on_gpu(options.rounds, options.calls), "torch")
    else:
        if not options.own:
            console.print("no GPU that torch can use here: only what unicomm itself does is measured")
        title = "all_reduce of 4 floats, one rank, over a library that does nothing"
        told["own part"] = show(title, own_part(options.rounds, options.calls), "a call")
        title = "operations of 4 floats, one rank of two, over a library that does nothing"
        told["operations"] = show(title, of_operations(options.rounds, options.calls))
    if options.json:
        options.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
