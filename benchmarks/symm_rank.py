"""One rank of symm.py. It takes the commands of cpu_rank.py.

What each contender does in an operation, with `bytes` for a rank's rows of 256 bytes:
    all_to_all_v   rows go to all ranks, unequally. Gloo, MPI and all_to_all_v_single are told what they get;
                   the exchanges on symmetric memory find out.
    dispatch       rows go to experts, two on each rank. Gloo and MPI exchange the numbers, then the rows, and
                   leave them unsorted; dispatch on symmetric memory sorts them by expert.
    combine        rows go back to their ranks. Gloo and MPI already know the numbers.
    put, get       one message to the next rank, or from it; all ranks at the same time
    signal         to the other rank and back: a put and a signal, or a message
    copy           the least that a rank has to do: it copies its rows in its own memory
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from cpu_rank import Call, serve

WIDTH = 64
EXPERTS = 2
ROW = WIDTH * 4


class Case:
    """The numbers of one operation, the same for all contenders."""

    def __init__(self, operation: str, nbytes: int, rank: int, size: int) -> None:
        self.operation, self.rank, self.size = operation, rank, size
        self.rows = max(nbytes // ROW, 2 * size * EXPERTS)
        k = size * EXPERTS if operation in ("dispatch", "combine") else size
        # More and more for each next one, and another begin on each rank.
        self.splits = [[self._share((i + 3 * r) % k, k) for i in range(k)] for r in range(size)]

    def _share(self, i: int, k: int) -> int:
        total = k * (k + 1) // 2
        return self.rows * (i + 1) // total

    @property
    def own(self) -> list[int]:
        return self.splits[self.rank]

    def to(self, rank: int) -> int:
        """Rows that this rank sends to `rank`."""
        per = len(self.own) // self.size
        return sum(self.own[rank * per : (rank + 1) * per])

    def from_(self, rank: int) -> int:
        per = len(self.own) // self.size
        return sum(self.splits[rank][self.rank * per : (self.rank + 1) * per])

    def values(self) -> torch.Tensor:
        """A row says where it comes from and which one it is."""
        rows = torch.arange(self.rows, dtype=torch.float32)[:, None].expand(self.rows, WIDTH).clone()
        rows[:, 1] = self.rank
        return rows

    def wanted(self) -> torch.Tensor:
        """All rows that this rank gets, by rank."""
        per = len(self.own) // self.size
        parts = []
        for p in range(self.size):
            first = sum(self.splits[p][: self.rank * per])
            rows = torch.arange(first, first + self.from_(p), dtype=torch.float32)[:, None]
            parts.append(rows.expand(len(rows), WIDTH).clone())
            parts[-1][:, 1] = p
        return torch.cat(parts)


def by_row(rows: torch.Tensor) -> torch.Tensor:
    """In the order of where they come from."""
    return rows[(rows[:, 1] * 1e6 + rows[:, 0]).argsort()]


def expect(got: torch.Tensor, wanted: torch.Tensor, case: Case) -> None:
    if not torch.equal(got, wanted):
        raise SystemExit(f"rank {case.rank}: wrong result of {case.operation}")


Maker = Callable[[Case], Call | None]


def on_symmetric_memory(comm: Any, with_dev: bool) -> Maker:
    """unicomm.symm. `with_dev`: the splits are in symmetric memory too."""
    from unicomm import symm

    held: list[Any] = []

    def empty(*size: int, dtype: torch.dtype = torch.float32) -> Any:
        held.append(symm.empty(*size, dtype=dtype, comm=comm))
        return held[-1]

    def make(case: Case) -> Call | None:
        for one in held:
            if isinstance(one, torch.Tensor):
                symm.free(one, comm)
            else:
                one.free()
        held.clear()
        n, me = case.size, case.rank
        x, out = empty(case.rows, WIDTH), empty(case.rows * n, WIDTH)
        x.copy_(case.values())
        total = sum(case.from_(p) for p in range(n))
        k = len(case.own)
        splits, there = empty(k, dtype=torch.int64), empty(2, k, dtype=torch.int64)
        splits.copy_(torch.tensor(case.own))
        comm.barrier()
        if case.operation == "all_to_all_v":
            if with_dev:
                run: Call = lambda: symm.all_to_all_vdev(x, out, splits, there, comm)  # noqa: E731
            else:
                run = lambda: symm.all_to_all_v(x, out, case.own, comm)  # noqa: E731
            run()
            expect(out[:total], case.wanted(), case)
            return run
        if not with_dev and case.operation in ("dispatch", "combine"):
            return None
        if case.operation in ("dispatch", "combine"):
            dispatch: Call = lambda: symm.all_to_all_vdev_2d(x, out, splits, there, comm)  # noqa: E731
            dispatch()
            rows = torch.cat([out[at : at + m] for m, at in there.T.tolist()])
            expect(by_row(rows), by_row(case.wanted()), case)
            if case.operation == "dispatch":
                return dispatch
            back, again = empty(case.rows, WIDTH), empty(2, k, dtype=torch.int64)
            combine: Call = lambda: symm.all_to_all_vdev_2d_offset(out, back, there, again, comm)  # noqa: E731
            combine()
            expect(back[: sum(case.own)], case.values()[: sum(case.own)], case)
            return combine
        if with_dev:
            return None
        after, before = (me + 1) % n, (me - 1) % n
        if case.operation in ("put", "get"):
            window = comm.new_window(out[: case.rows])
            held.append(window)
            mine = case.values()
            if case.operation == "put":
                run = lambda: window.put(mine, after, 0)  # noqa: E731
            else:
                run = lambda: window.get(mine, before, 0)  # noqa: E731
                out[: case.rows].copy_(mine)
            window.barrier()
            run()
            window.barrier()
            got = out[: case.rows] if case.operation == "put" else mine
            expect(got[:, 1], torch.full((case.rows,), float(before)), case)
            return run
        if case.operation == "signal" and n == 2:
            window = comm.new_window(out[: case.rows])
            held.append(window)
            mine, other = case.values(), 1 - me
            window.barrier()

            def there_and_back() -> None:
                if me == 1:
                    window.wait_signal(0)
                window.put(mine, other, 0)
                window.signal(other)
                if me == 0:
                    window.wait_signal(1)

            there_and_back()
            window.barrier()
            expect(out[: case.rows, 1], torch.full((case.rows,), float(other)), case)
            return there_and_back
        if case.operation == "copy":
            return lambda: out[: case.rows].copy_(x)
        return None

    return make


def messages(case: Case, send: Callable[[Any, int], Any], recv: Callable[[Any, int], Any]) -> Call | None:
    if case.operation != "signal" or case.size != 2:
        return None
    rows = case.values()

    def there_and_back() -> None:
        if case.rank == 0:
            send(rows, 1)
            recv(rows, 1)
        else:
            recv(rows, 0)
            send(rows, 0)

    there_and_back()
    expect(rows[:, 1], torch.zeros(case.rows), case)
    return there_and_back


def by_exchanges(
    case: Case, numbers: Callable[[Any, Any], Any], rows: Callable[[Any, Any, list[int], list[int]], Any]
) -> Call | None:
    """What is made of an all-to-all of numbers and one of rows, for which the receiver must know them."""
    if case.operation not in ("all_to_all_v", "dispatch", "combine"):
        return None
    n = case.size
    sent, came = [case.to(p) for p in range(n)], [case.from_(p) for p in range(n)]
    x, out = case.values()[: sum(sent)], torch.zeros(sum(came), WIDTH)
    if case.operation == "combine":
        rows(out, x, came, sent)
        back = torch.zeros_like(x)
        rows(back, out, sent, came)
        expect(back, x, case)
        return lambda: rows(back, out, sent, came)
    splits, theirs = torch.tensor(case.own), torch.zeros(len(case.own), dtype=torch.int64)

    def run() -> None:
        if case.operation == "dispatch":
            numbers(theirs, splits)
            told = theirs.view(n, -1).sum(1).tolist()
            rows(out, x, told, sent)
        else:
            rows(out, x, came, sent)

    run()
    expect(out, case.wanted(), case)
    return run


def ordinary(comm: Any) -> Maker:
    """unicomm's collectives, on tensors of torch.empty."""
    return lambda case: (
        by_exchanges(
            case,
            comm.all_to_all_single,
            comm.all_to_all_v_single,
        )
        or messages(case, comm.send, comm.recv)
    )


def gloo() -> Maker:
    import torch.distributed as dist

    return lambda case: (
        by_exchanges(case, dist.all_to_all_single, dist.all_to_all_single)
        or messages(case, dist.send, dist.recv)
    )


def mpi(comm: Any) -> Maker:
    """mpi4py, given torch's tensors."""
    from mpi4py import MPI

    windows: list[Any] = []

    def elements(tensor: torch.Tensor, counts: list[int]) -> list[Any]:
        return [tensor, [n * WIDTH for n in counts], MPI.FLOAT]

    def one_sided(case: Case) -> Call | None:
        if case.operation not in ("put", "get"):
            return None
        for window in windows:
            window.Unlock_all()
            window.Free()
        windows.clear()
        memory = MPI.Win.Allocate(case.rows * ROW, 4, comm=comm)
        windows.append(memory)
        shown = torch.frombuffer(memory.tomemory(), dtype=torch.float32).view(case.rows, WIDTH)
        memory.Lock_all()
        mine, after, before = case.values(), (case.rank + 1) % case.size, (case.rank - 1) % case.size

        def run() -> None:
            if case.operation == "put":
                memory.Put(mine, after)
                memory.Flush(after)
            else:
                memory.Get(mine, before)
                memory.Flush(before)

        if case.operation == "get":
            shown.copy_(mine)
        memory.Sync()
        comm.Barrier()
        run()
        comm.Barrier()
        memory.Sync()
        got = shown if case.operation == "put" else mine
        expect(got[:, 1], torch.full((case.rows,), float(before)), case)
        return run

    return lambda case: (
        by_exchanges(
            case,
            lambda out, x: comm.Alltoall(x, out),
            lambda out, x, came, sent: comm.Alltoallv(elements(x, sent), elements(out, came)),
        )
        or messages(case, comm.Send, comm.Recv)
        or one_sided(case)
    )


def contenders(group: str) -> tuple[int, int, dict[str, tuple[Maker, Call]]]:
    """Rank, size, and each contender's maker and barrier."""
    if group != "torch":
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        return world.rank, world.size, {group: (mpi(world), world.Barrier)}
    import torch.distributed as dist

    from unicomm import symm

    dist.init_process_group("gloo")
    comm = dist.new_group(backend="unicomm").get_comm()  # type: ignore[union-attr]
    symm.init(comm)
    ours: Call = comm.barrier
    return (
        dist.get_rank(),
        dist.get_world_size(),
        {
            "unicomm": (on_symmetric_memory(comm, False), ours),
            "unicomm, vdev": (on_symmetric_memory(comm, True), ours),
            "unicomm, any tensors": (ordinary(comm), ours),
            "Gloo": (gloo(), dist.barrier),
        },
    )


def main() -> None:
    torch.set_num_threads(1)
    group = sys.argv[1]
    rank, size, table = contenders(group)

    def prepare(command: dict[str, Any]) -> Call | None:
        return table[command["contender"]][0](Case(command["operation"], command["bytes"], rank, size))

    serve(group, rank, size, list(table), prepare, lambda contender: table[contender][1])


if __name__ == "__main__":
    main()
