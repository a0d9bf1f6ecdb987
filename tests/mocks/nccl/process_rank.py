"""A rank of the mock in a process: process_rank.py LIBRARY WHAT RANK NRANKS, with the unique id on stdin.

Prints a line when it is ready and one with what came out, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time

import numpy as np

from tests.mocks.nccl.api import SUM, Mock, UniqueId, WaitSignalDesc


def data(mock: Mock, comm: int, rank: int, n: int) -> object:
    stream, count = mock.stream(), 100_003
    values = np.arange(count, dtype=np.int64) * (rank + 1)
    total = np.zeros_like(values)
    mock.call("ncclAllReduce", values, total, count, 4, SUM, comm, stream)
    got = np.zeros_like(values)
    mock.call("ncclGroupStart")
    mock.call("ncclSend", values, count, 4, (rank + 1) % n, comm, stream)
    mock.call("ncclRecv", got, count, 4, (rank - 1) % n, comm, stream)
    mock.call("ncclGroupEnd")
    mock.synchronize(stream)
    # A put into another process, and its signal.
    memory, window = ctypes.c_void_p(), ctypes.c_void_p()
    mock.call("ncclMemAlloc", ctypes.byref(memory), 8192)
    mock.call("ncclCommWindowRegister", comm, memory, 8192, ctypes.byref(window), 1)
    ctypes.c_int.from_address(memory.value).value = rank + 100
    peer = (rank + 1) % n
    mock.call("ncclPutSignal", memory.value, 1, 2, peer, window, 4096, 0, 0, 0, comm, stream)
    wait = WaitSignalDesc(1, (rank - 1) % n, 0, 0)
    mock.call("ncclWaitSignal", 1, ctypes.byref(wait), comm, stream)
    mock.synchronize(stream)
    put = ctypes.c_int.from_address(memory.value + 4096).value
    mock.call("ncclCommWindowDeregister", comm, window.value)
    mock.call("ncclMemFree", memory.value)
    mock.call("ncclCommDestroy", comm)
    right = sum(np.arange(count, dtype=np.int64) * (r + 1) for r in range(n))
    return [bool((total == right).all()), int(got[1]), put]


def lonely(mock: Mock, comm: int, rank: int, n: int) -> object:
    """All but the last rank wait for it, in vain; what the last does is up to the test."""
    if rank == n - 1:
        threading.Event().wait()
    stream, values = mock.stream(), np.zeros(4)
    mock.call("ncclAllReduce", values, values, 4, 8, SUM, comm, stream)
    while not mock.state(comm):
        time.sleep(0.01)
    state, text = mock.state(comm), mock.last_error(comm)
    mock.call("ncclCommAbort", comm)
    mock.synchronize(stream)
    return [state, text]


def main() -> None:
    library, what, rank, n = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    mock = Mock(library)
    uid = UniqueId.from_buffer_copy(bytes.fromhex(sys.stdin.readline()))
    comm = mock.init(n, uid, rank)
    print("ready", flush=True)
    print(json.dumps({"data": data, "lonely": lonely}[what](mock, comm, rank, n)), flush=True)


if __name__ == "__main__":
    main()
