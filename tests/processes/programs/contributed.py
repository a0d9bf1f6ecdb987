"""Three ranks of which one does its part in an operation and is killed within it: contributed.py OPERATION

Rank 0 waits, rank 1 is the victim, and rank 2 does not come, or, if OPERATION ends with "_stops", stops
itself in the midst of the data, when the first of them have arrived.
"""

import ctypes
import mmap
import os
import signal
import sys
import threading
import time

import torch

import unicomm
from tests.processes.programs.common import hear, reporting, say
from unicomm import symm

OPERATION = sys.argv[1]
SUM = unicomm.ReduceOp.SUM
SMALL, LARGE = 8, 4 << 20  # elements
MESSAGES = ("receives", "sends", "sent", "batch", "signal")
STOPS = OPERATION.endswith("_stops")


def tensors(n: int, world: int) -> list[torch.Tensor]:
    return [torch.ones(n) for _ in range(world)]


def stop_when_under_way(tensor: torch.Tensor) -> None:
    """Stops this process once the first element of `tensor` has changed, and before all have.

    A part of its memory cannot be accessed before that: the calling thread then waits in a signal handler.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGSEGV, ctypes.cast(libc.pause, ctypes.c_void_p))
    signal.signal(signal.SIGUSR1, lambda *_: None)  # ends the wait
    page, sixth = mmap.PAGESIZE, tensor.nbytes // 6
    start = ctypes.c_void_p((tensor.data_ptr() + sixth) // page * page)
    length = ctypes.c_size_t(sixth // page * page)
    assert libc.mprotect(start, length, 0) == 0
    view, before, caller = tensor.numpy(), float(tensor[0]), threading.get_ident()

    def watch() -> None:
        while view[0] == before:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGSTOP)
        assert libc.mprotect(start, length, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        for _ in range(20):  # the first one may come before the wait
            signal.pthread_kill(caller, signal.SIGUSR1)
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()


def act(comm: unicomm.Communicator, window: unicomm.Window | None) -> None:
    rank, world = comm.get_rank(), comm.get_size()
    n = LARGE if STOPS else SMALL
    one, parts, whole, gathered = (
        torch.ones(n),
        tensors(n, world),
        torch.ones(n * world),
        torch.zeros(n * world),
    )
    if STOPS and rank == 2:
        if OPERATION == "broadcast_stops":
            one.zero_()
        stop_when_under_way(one if OPERATION in ("all_reduce_stops", "broadcast_stops") else gathered)
    if rank == 2 and OPERATION in MESSAGES:
        comm.barrier()
        return
    match OPERATION.removesuffix("_stops"):
        case "barrier":
            comm.barrier()
        case "all_reduce":
            comm.all_reduce(one, SUM)
        case "queued":
            comm.all_reduce(one, SUM, async_op=True).wait()
        case "broadcast":
            comm.broadcast(one, 0 if STOPS else 1)
        case "reduce":
            comm.reduce(one, 0, SUM)
        case "all_gather":
            comm.all_gather(parts, one)
        case "all_gather_single":
            comm.all_gather_single(gathered, one)
        case "gather":
            comm.gather(parts if rank == 0 else [], one, 0)
        case "scatter":
            comm.scatter(one, parts if rank == 0 else [], 0)
        case "reduce_scatter_single":
            comm.reduce_scatter_single(one, whole, SUM)
        case "all_to_all_single":
            comm.all_to_all_single(gathered, whole)
        case "receives":  # both wait for a message of the rank that does not come
            comm.recv(one, 2)
        case "sends":  # more than fits on its way
            comm.send(torch.ones(LARGE), 2)
        case "sent":  # the message of the victim has arrived when it is killed
            if rank == 1:
                comm.send(one, 0)
                say("sent")
                hear()
            comm.recv(one, 1)
            comm.recv(one, 2)
        case "batch":
            batch = comm.batch_op_create()
            if rank == 1:
                batch.send(one, 0)
                batch.recv(parts[0], 2)
            else:
                batch.recv(one, 1)
                batch.recv(parts[0], 2)
            batch.issue(async_op=False)
        case "signal":
            assert window is not None
            window.wait_signal(2)
        case "window_barrier":
            assert window is not None
            window.barrier()
        case _:
            raise ValueError(OPERATION)


def main() -> None:
    comm = unicomm.new_comm("shm", torch.device("cpu"), name="main", timeout=120)
    window = None
    if OPERATION in ("signal", "window_barrier"):
        symm.init(comm)
        window = comm.new_window()
    comm.barrier()
    say("ready")
    if comm.get_rank() == 2 and not STOPS:
        hear()
    say("calling")
    with reporting():
        act(comm, window)


main()
