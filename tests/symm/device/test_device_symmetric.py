"""Symmetric memory on devices, over the mocks: ranks as threads."""

import sys
import threading

import pytest
import torch

import unicomm
from tests.mocks.device import backend as device_mock
from tests.mocks.nccl.kinds import streams_of
from tests.symm.device import device_bodies
from unicomm import symm
from unicomm.comms.memory.device_kernels import CupyLauncher
from unicomm.testing import run_ranks


def run(backend, program, n, **options):
    return run_ranks(program, n, backend=backend.name, **options)


@pytest.mark.parametrize("n", [1, 2])
def test_everything(mock_device, n):
    run(mock_device, (lambda comm: device_bodies.all_of_it(comm, more=True)) if n > 1 else one_rank, n)


def one_rank(comm):
    symm.init(comm)
    device_bodies.exchanges(comm)


def test_teams(mock_device):
    assert run(mock_device, device_bodies.teams, 4) == [2, 4, 2, 4]


def test_in_the_order_of_streams(mock_device):
    """On streams of its own nothing waits on the host, and operations keep their order."""

    def program(comm):
        symm.init(comm)
        n, me = comm.get_size(), comm.get_rank()
        x = device_bodies.shared(comm, torch.full((4,), me + 1.0))
        y, ones = device_bodies.shared(comm, torch.zeros(4)), device_bodies.shared(comm, [1] * n)
        there = symm.empty(2, n, dtype=torch.int64, comm=comm)
        streams = streams_of(comm)
        one, two = streams.new(), streams.new()
        with streams.use(one):
            streams.sleep(50)
            symm.two_shot_all_reduce_(x, comm)
            assert x.tolist() == [me + 1] * 4  # it has not begun
        with streams.use(two):
            symm.put(x, (me + 1) % n, comm)
            symm.all_to_all_vdev(x, y, ones, there, comm)
            symm.synchronize(comm)
        assert x.tolist() == [n * (n + 1) / 2] * 4
        assert y.tolist()[:n] == [n * (n + 1) / 2] * n

    run(mock_device, program, 3)


def test_graphs(mock_device):
    """What is captured does the same again with other data: what ranks count is counted on the device."""
    from tests.mocks.nccl.graphs import HostGraph

    alone = threading.Barrier(2)  # who asks for events ends all captures of a process

    def program(comm):
        symm.init(comm)
        n, me = comm.get_size(), comm.get_rank()
        x, total = (device_bodies.shared(comm, torch.zeros(4)) for _ in range(2))
        rows, sent = (device_bodies.shared(comm, torch.zeros(4 * n)) for _ in range(2))
        splits, there = device_bodies.shared(comm, [0] * n), symm.empty(2, n, dtype=torch.int64, comm=comm)
        window = comm.new_window(device_bodies.shared(comm, torch.zeros(1)))
        graph = HostGraph(streams_of(comm))
        streams = streams_of(comm)
        alone.wait()
        with graph.capture():
            symm.one_shot_all_reduce(x, comm, out=total)
            window.put(total[:1], (me + 1) % n, 0, False)
            window.signal((me + 1) % n, False)
            window.wait_signal((me - 1) % n, False)
            symm.all_to_all_vdev(rows, sent, splits, there, comm)
            for call in (
                lambda: symm.all_to_all_v(rows, sent, [1] * n, comm),
                lambda: symm.empty(3, comm=comm),
            ):
                with pytest.raises(unicomm.UnsupportedError, match="a graph cannot capture"):
                    call()
        alone.wait()
        with streams.use(streams.new()):
            for step in range(3):
                x.fill_(step + me)
                rows.fill_(me)
                splits.fill_(step)
                comm.barrier(False)
                graph.replay()
                symm.synchronize(comm)
                assert total[0] == window.get_tensor()[0] == n * step + n * (n - 1) / 2
                assert there[0].tolist() == [step] * n
                assert sent[: n * step].tolist() == [p for p in range(n) for _ in range(step)]
                comm.barrier(False)
            splits.fill_(5)
            comm.barrier(False)
            graph.replay()
            with pytest.raises(unicomm.InvalidArgumentError, match="splits of rank 0"):
                symm.synchronize(comm)
        graph.reset()

    run(mock_device, program, 2)


def test_gradients_through_an_exchange(mock_device):
    def program(comm):
        symm.init(comm)
        me = comm.get_rank()
        exchange = symm.ExpertExchange(comm, experts=2, rows=6, width=3)
        x = torch.ones(6, 3, requires_grad=True)
        rows, route = exchange.dispatch(x, [[1, 2, 0, 3], [2, 0, 2, 2]][me])
        done = [rows[block] * (2 * me + expert) for expert, block in enumerate(route.blocks)]
        exchange.combine(torch.cat(done), route).sum().backward()
        exchange.free()
        return x.grad[:, 0].tolist()

    assert run(mock_device, program, 2) == [[0, 1, 1, 3, 3, 3], [0, 0, 2, 2, 3, 3]]


def check_missed(comm, x):
    """Rank 1 does not come to an operation, which names it and breaks the communicator."""
    with pytest.raises(unicomm.CommTimeoutError, match="rank 1") as error:
        device_bodies.settled(comm, lambda: symm.one_shot_all_reduce(x, comm, timeout=0.3))
    assert tuple(error.value.culprits) == (1,)
    with pytest.raises(unicomm.CommTimeoutError, match="broken earlier"):
        symm.broadcast(x, 0, comm)


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_rank_that_does_not_come(mock_device, own_stream):
    over = threading.Event()  # whose communicator ends is no longer absent but gone

    def program(comm):
        symm.init(comm)
        x = device_bodies.shared(comm, torch.ones(4))
        streams = streams_of(comm)
        if comm.get_rank() == 1:
            over.wait(60)
            return
        with streams.use(streams.new() if own_stream else streams.current()):
            check_missed(comm, x)
        over.set()

    run(mock_device, program, 2)


def refused(comm, x, y, there, splits):
    """An exchange that all ranks refuse on the device, without asking for it."""
    splits.fill_(100)
    comm.barrier(False)
    symm.all_to_all_vdev(x, y, splits, there, comm)


def test_a_timeout_behind_a_refusal_that_nobody_read(mock_device):
    over = threading.Event()

    def program(comm):
        symm.init(comm)
        n = comm.get_size()
        x, y = (device_bodies.shared(comm, torch.ones(4)) for _ in range(2))
        splits, there = device_bodies.shared(comm, [0] * n), symm.empty(2, n, dtype=torch.int64, comm=comm)
        refused(comm, x, y, there, splits)
        if comm.get_rank() == 1:
            over.wait(60)
            return
        check_missed(comm, x)
        over.set()

    run(mock_device, program, 2)


def test_numbers_of_an_exchange_are_never_left_out(mock_device):
    over = threading.Event()

    def program(comm):
        symm.init(comm)
        me, n = comm.get_rank(), comm.get_size()
        x, y = (device_bodies.shared(comm, torch.ones(4)) for _ in range(2))
        splits, there = device_bodies.shared(comm, [0] * n), symm.empty(2, n, dtype=torch.int64, comm=comm)
        refused(comm, x, y, there, splits)
        with pytest.raises(unicomm.InvalidArgumentError, match="splits of rank 0"):
            symm.all_to_all_v(x, y, [1] * n, comm)
        assert symm.all_to_all_v(x, y, [1] * n, comm) == [1] * n
        with pytest.raises(unicomm.MismatchError):
            symm.all_to_all_v(x, y if me else y[:2], [1] * n, comm, relaxed=bool(me))
        if me == 1:
            over.wait(60)
            return
        with pytest.raises(unicomm.CommTimeoutError, match="rank 1"):
            symm.all_to_all_v(x, y, [1] * n, comm, timeout=0.3)
        over.set()

    run(mock_device, program, 2)


def test_abort_ends_waits(mock_device):
    over = threading.Event()  # whose communicator ends is no longer absent but gone

    def program(comm):
        symm.init(comm)
        x = device_bodies.shared(comm, torch.ones(4))
        streams = streams_of(comm)
        if comm.get_rank() == 1:
            over.wait(60)
            return
        with streams.use(streams.new()):
            symm.one_shot_all_reduce(x, comm)
            comm.abort()
            streams.synchronize()  # it would wait for minutes
        over.set()

    run(mock_device, program, 2, timeout=300)


def test_what_is_refused_before_anything(mock_device):
    def program(comm):
        symm.init(comm)
        waves = device_bodies.shared(comm, torch.ones(4, dtype=torch.complex64))
        with pytest.raises(unicomm.UnsupportedError, match="is not defined"):
            symm.one_shot_all_reduce(waves, comm)
        with pytest.raises(unicomm.InvalidArgumentError, match="not in the symmetric memory"):
            symm.broadcast(torch.ones(3), 0, comm)
        with pytest.raises(unicomm.InvalidArgumentError, match="no room"):
            symm.empty(1 << 40, comm=comm)

    run(mock_device, program, 1)


def test_ranks_on_several_hosts(mock_device, monkeypatch):
    monkeypatch.setattr(mock_device, "host", lambda self: f"host {self._rank}")

    def program(comm):
        with pytest.raises(unicomm.UnsupportedError, match="several hosts") as error:
            symm.init(comm)
        assert "nvshmem" in error.value.hint

    run(mock_device, program, 2, hints={"symmetric": "cuda_ipc"})


def test_a_rank_without_a_compiler(mock_device, monkeypatch):
    """It says what to install, and the others that it cannot."""

    def kernels(self, device):
        return CupyLauncher(device) if self._rank == 1 else device_mock.HostLauncher(self.path)

    monkeypatch.setattr(mock_device, "kernels", kernels)
    monkeypatch.setitem(sys.modules, "cupy", None)

    def program(comm):
        says = "needs cupy" if comm.get_rank() == 1 else r"ranks \[1\] cannot compile"
        with pytest.raises(unicomm.UnsupportedError, match=says) as error:
            symm.init(comm)
        assert "install" in error.value.hint

    run(mock_device, program, 2)
