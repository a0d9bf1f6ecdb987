"""Results that fit no cache are written past the caches, and broadcasts go in pieces: nothing is lost."""

from __future__ import annotations

import pytest
import torch

import unicomm
from unicomm.testing import run_ranks

MIB = 1 << 20


def pattern(count: int, salt: int) -> torch.Tensor:
    return ((torch.arange(count, dtype=torch.int32) * 7 + salt) % 251).to(torch.uint8)


@pytest.mark.parametrize("ranks", [2, 3])
def test_results_past_the_caches(ranks):
    """Odd sizes at odd addresses: streaming stores write whole cache lines only."""
    count = 40 * MIB // ranks + 13  # 40 MiB: more than the last cache of one core's share on common machines

    def program(comm: unicomm.Communicator) -> None:
        me = comm.get_rank()
        mine = torch.empty(count + 3, dtype=torch.uint8)[3:]
        mine.copy_(pattern(count, me))
        out = torch.full((ranks * count + 7,), 255, dtype=torch.uint8)
        comm.all_gather_single(out[5:-2], mine, False)
        assert out[:5].eq(255).all()
        assert out[-2:].eq(255).all()
        for r, part in enumerate(out[5:-2].view(ranks, count)):
            assert torch.equal(part, pattern(count, r))
        sent = torch.cat([pattern(count, 10 * me + r) for r in range(ranks)])
        comm.all_to_all_single(out[1:-6], sent, False)
        assert out[0] == 255
        assert out[-2:].eq(255).all()
        for r, part in enumerate(out[1:-6].view(ranks, count)):
            assert torch.equal(part, pattern(count, 10 * r + me))
        whole = torch.zeros(ranks, count, dtype=torch.uint8)
        whole[me] = pattern(count, me)
        comm.all_gather_single(whole.view(-1), whole[me], False)  # in place
        for r in range(ranks):
            assert torch.equal(whole[r], pattern(count, r))

    run_ranks(program, ranks, timeout=100)


@pytest.mark.parametrize("ranks", [2, 3])
def test_broadcasts_of_all_sizes(ranks):
    def program(comm: unicomm.Communicator) -> None:
        me = comm.get_rank()
        sizes = [k * 64 * 1024 + odd for k in (1, 2, 3, 8, 17, 48, 49, 97) for odd in (-1, 0, 1)]
        for turn, size in enumerate(sizes):
            root = turn % ranks
            tensor = pattern(size, turn) if me == root else torch.zeros(size, dtype=torch.uint8)
            comm.broadcast(tensor, root, False)
            assert torch.equal(tensor, pattern(size, turn)), size

    run_ranks(program, ranks)


def test_pieces_of_a_broadcast_fit_into_small_slots():
    def program(comm: unicomm.Communicator) -> None:
        tensor = pattern(MIB + 1, 3) if comm.get_rank() == 1 else torch.zeros(MIB + 1, dtype=torch.uint8)
        comm.broadcast(tensor, 1, False)
        assert torch.equal(tensor, pattern(MIB + 1, 3))

    for slot in ("4K", "64K", "100K", "1M"):
        run_ranks(program, 2, hints={"slot_bytes": slot})
