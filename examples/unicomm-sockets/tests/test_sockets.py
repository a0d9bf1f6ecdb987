"""The backend by unicomm's conformance suite; and ranks that abort, end, come late and disagree."""

import multiprocessing
import os
import socket
import threading

import pytest
import torch

import unicomm
from unicomm import ReduceOp
from unicomm.testing import conformance, run_ranks

BACKEND = "sockets"


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("operation", conformance.OPERATIONS)
def test_conformance(operation, world):
    run_ranks(lambda comm: conformance.check(comm, operation), world, backend=BACKEND)


@pytest.mark.parametrize("operation", conformance.REDUCTIONS)
def test_rounding(operation):
    run_ranks(lambda comm: conformance.check_rounding(comm, operation), 2, backend=BACKEND)


def test_the_name_is_known():
    assert BACKEND in unicomm.backend_names()


def test_abort_ends_the_other_ranks():
    def program(comm):
        if comm.rank == 0:
            threading.Timer(0.1, comm.abort).start()  # from another thread, while rank 0 waits too
        with pytest.raises(unicomm.AbortedError) as raised:
            comm.recv(torch.empty(1), src=2 if comm.rank < 2 else 0)
        return raised.value.culprits

    assert run_ranks(program, 3, backend=BACKEND) == [(0,)] * 3


def test_a_timeout_ends_the_other_ranks():
    def program(comm):
        if comm.rank == 2:
            entered.wait()  # until the others have given up
            return ()
        with pytest.raises(unicomm.CommTimeoutError) as raised:
            comm.recv(torch.empty(1), src=2 if comm.rank == 0 else 0, timeout=0.2 if comm.rank == 0 else 60)
        entered.wait()
        return raised.value.culprits

    entered = threading.Barrier(3, timeout=60)
    assert run_ranks(program, 3, backend=BACKEND)[:2] == [(2,), (2,)]


def test_a_rank_that_finalizes_is_lost_to_those_that_wait():
    def program(comm):
        if comm.rank == 0:
            return ()
        with pytest.raises(unicomm.PeerLostError) as raised:
            comm.recv(torch.empty(1), src=0)
        return raised.value.culprits

    assert run_ranks(program, 2, backend=BACKEND)[1] == (0,)


def test_what_was_sent_before_the_end_arrives():
    def program(comm):
        x = torch.full((100_000,), 7.0)
        if comm.rank == 0:
            comm.send(x, dst=1)
            return 7.0
        comm.recv(x.zero_(), src=0)
        return x[-1].item()

    assert run_ranks(program, 2, backend=BACKEND) == [7.0, 7.0]


def test_different_sizes_are_a_mismatch_and_nothing_is_written():
    def program(comm):
        if comm.rank == 0:
            comm.send(torch.ones(3), dst=1)
            comm.send(torch.full((4,), 2.0), dst=1)
            return
        x = torch.zeros(4)
        with pytest.raises(unicomm.MismatchError, match=r"12 bytes.* 16"):
            comm.recv(x, src=0)
        assert x.tolist() == [0.0] * 4
        comm.recv(x, src=0)
        assert x.tolist() == [2.0] * 4

    run_ranks(program, 2, backend=BACKEND)


def test_large_messages_both_ways_do_not_wait_for_each_other():
    def program(comm):
        other, got = 1 - comm.rank, torch.empty(1 << 20)
        batch = comm.batch_op_create()
        batch.send(torch.full((1 << 20,), float(comm.rank)), other).recv(got, other).issue()
        return got.mean().item()

    assert run_ranks(program, 2, backend=BACKEND) == [1.0, 0.0]


def test_wrong_hints_are_refused():
    with pytest.raises(unicomm.InvalidArgumentError, match="no hint 'adress'"):
        unicomm.new_comm(BACKEND, "cpu", hints={"adress": "127.0.0.1"})


def killed(rank, path, pipe):
    from unicomm.c10d.compat import FileStore

    comm = unicomm.new_comm(BACKEND, "cpu", rank=rank, size=2, store=FileStore(path, 2), timeout=60)
    x = torch.ones(1)
    comm.all_reduce(x, ReduceOp.SUM)
    if rank == 1:
        os._exit(9)
    try:
        comm.barrier()
    except unicomm.PeerLostError as error:
        pipe.send(error.culprits)


def test_a_killed_rank_is_named(tmp_path):
    start = multiprocessing.get_context("spawn")
    mine, theirs = start.Pipe()
    ranks = [start.Process(target=killed, args=(r, str(tmp_path / "store"), theirs)) for r in range(2)]
    for one in ranks:
        one.start()
    assert mine.poll(60)
    assert mine.recv() == (1,)
    for one in ranks:
        one.join(60)


def test_a_stranger_takes_nobodys_place(monkeypatch):
    """Somebody who finds the port of a rank and says something else."""
    listen = socket.create_server

    def crowded(address, **options):
        server = listen(address, **options)
        strangers.append(socket.create_connection(server.getsockname()))
        strangers[-1].sendall(b"x" * 64)
        return server

    strangers = []
    monkeypatch.setattr(socket, "create_server", crowded)
    assert run_ranks(lambda comm: comm.barrier().is_completed(), 2, backend=BACKEND) == [True, True]
    assert len(strangers) == 2
    for one in strangers:
        one.close()
