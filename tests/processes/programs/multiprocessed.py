"""A rank as a child of multiprocessing. multiprocessed.py METHOD FOLDER FAILS"""

import multiprocessing
import os
import sys


def child(folder, fails):
    import torch

    import unicomm

    os.environ["UNICOMM_TRACE_DIR"] = folder
    comm = unicomm.new_comm("shm", torch.device("cpu"), name="alone", rank=0, size=1)
    comm.barrier(False)
    assert os.listdir(folder)
    if fails:
        raise ValueError("on purpose")


if __name__ == "__main__":
    method, folder, fails = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
    process = multiprocessing.get_context(method).Process(target=child, args=(folder, fails))
    process.start()
    process.join()
    sys.exit(process.exitcode)
