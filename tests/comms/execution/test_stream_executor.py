"""The executor of operations on streams, over the mock NCCL."""

import gc
import threading
import weakref

import torch

from tests.comms import inside
from tests.mocks.nccl.graphs import Together
from unicomm import Communicator, ReduceOp
from unicomm.testing import drain, run_ranks

SUM = ReduceOp.SUM


def test_a_forked_child_gives_nothing_back(mock_nccl):
    """A device's events are destroyed by its runtime, which a forked child must not call."""

    def program(comm: Communicator) -> None:
        released, executor = threading.Event(), inside.executor(comm)
        executor.streams.call(lambda: released.wait(60))
        x = torch.ones(4)
        under_way = weakref.ref(x)
        comm.all_reduce(x, ReduceOp.SUM, True)
        del x
        executor.forget()  # as a child does; here the parent goes on
        assert not executor.busy
        gc.collect()
        assert under_way() is not None
        released.set()
        executor.streams.synchronize()

    run_ranks(program, 1, backend=mock_nccl)


def test_nobody_asks_for_events_while_a_graph_is_captured(mock_nccl, eventually, monkeypatch):
    together = Together(2)
    released = threading.Event()
    looks = []

    def program(comm: Communicator) -> None:
        executor = inside.executor(comm)
        x, y = torch.ones(4), torch.ones(4)
        executor.streams.call(lambda: released.wait(60))
        work = comm.all_reduce(x, SUM, False)  # is not over during the capture: the watchdog looks after it
        look = executor.look
        monkeypatch.setattr(executor, "look", lambda now: (looks.append(comm.get_rank()), look(now)))

        def body() -> None:
            comm.all_reduce(y, SUM, False)
            before = len(looks)
            eventually(lambda: len(looks) > before + 4)

        graph = together.capture(comm, body)
        graph.replay()
        released.set()
        work.wait_blocking()
        drain(comm)
        assert (x.tolist(), y.tolist()) == ([2.0] * 4, [2.0] * 4)

    run_ranks(program, 2, backend=mock_nccl)
