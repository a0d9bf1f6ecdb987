"""Three ranks as forked children of multiprocessing that do not finalize: multiprocessed_ranks.py FOLDER

Rank 1 ends when it has sent its message; rank 2 sends its own after that end, and rank 0 waits for both.
"""

import multiprocessing
import os
import sys
import time


def child(rank, folder, store, ended):
    import torch

    import unicomm
    from unicomm.c10d.compat import FileStore

    os.environ["UNICOMM_TRACE_DIR"] = folder
    comm = unicomm.new_comm(
        "shm", torch.device("cpu"), name="three", store=FileStore(store, 3), rank=rank, size=3, timeout=60
    )
    got = torch.zeros(1)
    comm.barrier()
    if rank == 2:
        assert ended.wait(60)
        time.sleep(0.5)  # rank 0 looks at the processes several times
    if rank > 0:
        comm.send(torch.tensor([rank + 1.0]), 0)
    else:
        for peer in (1, 2):
            comm.recv(got, peer)
            print(float(got))


if __name__ == "__main__":
    folder = sys.argv[1]
    context = multiprocessing.get_context("fork")
    ended = context.Event()
    store = os.path.join(folder, "store")
    ranks = [context.Process(target=child, args=(rank, folder, store, ended)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    ranks[1].join(60)
    ended.set()
    for rank in ranks:
        rank.join(60)
    sys.exit(any(rank.exitcode for rank in ranks))
