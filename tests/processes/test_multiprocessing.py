"""Ranks as children of multiprocessing: their rings go when they end well, and stay when they do not."""

import multiprocessing
import os

import pytest

pytestmark = pytest.mark.processes


def child(folder, fails):
    import torch

    import unicomm

    os.environ["UNICOMM_TRACE_DIR"] = folder
    comm = unicomm.new_comm("shm", torch.device("cpu"), name="alone", rank=0, size=1)
    comm.barrier(False)
    assert os.listdir(folder)
    if fails:
        raise ValueError("on purpose")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_the_ring_of_a_child(tmp_path, method, fails):
    tmp_path.chmod(0o700)
    process = multiprocessing.get_context(method).Process(target=child, args=(str(tmp_path), fails))
    process.start()
    process.join(60)
    assert process.exitcode == fails
    assert bool([f for f in os.listdir(tmp_path) if f.endswith(".ucring")]) == fails
