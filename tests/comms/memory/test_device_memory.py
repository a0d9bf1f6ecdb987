"""Symmetric memory of a device, over mocks: what outlives a communicator."""

import gc
import weakref

from tests.comms import inside
from unicomm import symm
from unicomm.testing import run_ranks


def test_what_kernels_look_at_outlives_an_abort(mock_device):
    """Nobody waits for them then; else it goes with the communicator."""

    def words_after(aborts):
        words = []

        def program(comm):
            symm.init(comm)
            words.append(weakref.ref(inside.symmetric_memory(comm).domain._words))
            if aborts:
                comm.abort()

        run_ranks(program, 1, backend=mock_device.name)
        gc.collect()
        return words[0]()

    assert words_after(aborts=False) is None
    kept = words_after(aborts=True)
    assert kept is not None
    assert kept[-2] == 1
