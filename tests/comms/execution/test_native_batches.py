"""Batches of messages on the fast path of shared memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import recorded
from tests.comms import inside
from unicomm import Communicator, InvalidArgumentError, MismatchError, Work
from unicomm.comms.batch import P2POp
from unicomm.testing import run_ranks

PLAIN = (False, None, None)
FIELDS = ("op", "seq", "peer", "state", "in_numel", "in_dtype", "in_dims", "out_numel", "out_dims")


def fill(comm: Communicator, sizes: list[int]):
    """A batch of one message to and one from each other rank for each size, and what it receives."""
    batch, got = comm.batch_op_create(), []
    me = comm.get_rank()
    for size in sizes:
        for peer in set(range(comm.get_size())) - {me}:
            array = np.full(size, me, np.int32)
            batch.send(torch.from_numpy(array) if size % 2 else array, peer)
            got.append((peer, torch.full((size,), -1, dtype=torch.int32)))
            batch.recv(got[-1][1], peer)
    return batch, got


@pytest.mark.parametrize("ranks", [2, 3])
def test_batches_of_all_sizes_are_recorded_like_those_of_the_general_way(ranks):
    """Also messages that no channel holds: they cannot block each other."""
    found = {}

    def program(comm, native):
        for sizes in ([0, 1], [7, 100_000, 2], [400_001]):
            batch, got = fill(comm, sizes)
            if native:
                work = inside.fast_path(comm).batch(batch.ops, *PLAIN)
                assert type(work) is Work
                assert work.name == "batch"
            else:
                batch.issue(async_op=True).wait()
            assert all((tensor == peer).all() for peer, tensor in got)
        records = recorded.of(comm)
        later = 0 if native else 1  # the flag of asynchronous operations
        assert {int(record["flags"]) for record in records} == {later | 4 | 2, later | 4 | 2 | 8}
        fields = [[np.asarray(record[field]).tolist() for field in FIELDS] for record in records]
        found[comm.get_rank(), native] = fields
        for record in records:
            assert record["batch"] == record["op_id"] + 1
            assert record["created_ns"] <= record["started_ns"] <= record["completed_ns"]
        assert len({int(record["batch"]) for record in records}) == 3

    run_ranks(lambda comm: program(comm, True), ranks)
    run_ranks(lambda comm: program(comm, False), ranks)
    for rank in range(ranks):
        assert len(found[rank, True]) == 2 * 6 * (ranks - 1)
        assert found[rank, True] == found[rank, False]


def test_issue_takes_the_fast_path_and_empties_the_batch():
    def program(comm):
        batch, got = fill(comm, [3])
        assert type(batch.issue()) is Work
        assert batch.ops == []
        assert got[0][1].tolist() == [1 - comm.get_rank()] * 3
        assert [int(record["flags"]) for record in recorded.of(comm)] == [4 | 2, 4 | 2 | 8]

    run_ranks(program, 2)


def test_what_is_odd_goes_the_general_way():
    def program(comm):
        x, y = torch.zeros(4), torch.zeros(4)
        peer, fast = 1 - comm.get_rank(), inside.fast_path(comm)
        fixed = np.zeros(4)
        fixed.flags.writeable = False
        for ops in (
            [],
            [P2POp("send", x, peer), P2POp("recv", x[:2], peer)],
            [P2POp("recv", x[1:], peer), P2POp("recv", x[:2], peer)],
            [P2POp("recv", fixed, peer)],
            [P2POp("send", x, comm.get_rank())],
            [P2POp("send", x, 2)],
            [P2POp("send", x, True)],
            [P2POp("both", x, peer)],
            [P2POp(x, x, peer)],
            [P2POp("send", None, peer)],
            [("send", x, peer)],
        ):
            assert fast.batch(ops, *PLAIN) is False
        assert fast.batch([P2POp("send", x, peer)], True, None, None) is False
        assert fast.batch((P2POp("send", x, peer),), *PLAIN) is False
        assert recorded.of(comm) == []
        batch = comm.batch_op_create().send(x, peer).recv(x, peer)
        with pytest.raises(InvalidArgumentError, match="share memory"):
            batch.issue()
        assert len(batch.ops) == 2
        comm.batch_op_create().send(x, peer).send(x, peer).recv(y, peer).recv(y.clone(), peer).issue()

    run_ranks(program, 2)


def test_a_mismatch_is_told_and_the_others_arrive():
    def program(comm):
        peer = 1 - comm.get_rank()
        x, y, z = torch.ones(4), torch.zeros(5), torch.zeros(2)
        batch = comm.batch_op_create().send(x, peer).send(x[:2], peer).recv(y, peer).recv(z, peer)
        with pytest.raises(MismatchError) as caught:
            batch.issue()
        assert caught.value.op == "batch"
        assert caught.value.culprits == (0, 1)
        assert z.tolist() == [1.0, 1.0]
        assert {int(record["state"]) for record in recorded.of(comm)} == {4}

    run_ranks(program, 2)
