"""Messages with one tag keep their order, whatever other tags and receives stand between them."""

import random
import time

import pytest
import torch

from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.testing import run_ranks

BACKENDS = ("shm", "gloo", "tcp")
SIZES = (8, 40_000)  # elements: within a chunk of shared memory, and beyond


def ordered(comm, sends, receives, size):
    """Rank 0 sends messages with these tags; most have arrived when rank 1 asks for them."""
    group = UnicommProcessGroup(comm)
    if comm.get_rank() == 0:
        works = [group.send([torch.full((size,), float(at))], 1, tag) for at, tag in enumerate(sends)]
        for work in works:
            work.wait()
        comm.barrier()
        return
    time.sleep(0.005)
    at_tag = {tag: [at for at, one in enumerate(sends) if one == tag] for tag in {*sends}}
    wanted, got, works = [], [], []
    for tag, from_any in receives:
        wanted.append(float(at_tag[tag].pop(0)))
        got.append(torch.full((size,), -1.0))
        works.append(group.recv_anysource([got[-1]], tag) if from_any else group.recv([got[-1]], 0, tag))
    for work in works:
        work.wait()
    comm.barrier()
    assert [x[0].item() for x in got] == wanted
    assert all((x == x[0]).all() for x in got)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("backend", "from_any"),
    # Gloo itself gives a large message to a receive from its sender before an earlier one from any rank.
    [(backend, any_) for backend in BACKENDS for any_ in (False, True) if (backend, any_) != ("gloo", True)],
)
def test_a_receive_is_not_overtaken_by_a_later_one_with_its_tag(backend, size, from_any):
    """The one in between takes a message, after which theirs is next, while the first one's turn is over."""
    receives = [(2, from_any), (1, False), (2, False)]

    def program(comm):
        for _ in range(20):
            ordered(comm, [1, 2, 2], receives, size)

    run_ranks(program, 2, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", SIZES)
def test_random_tags(backend, size):
    choice = random.Random(size)
    plans = []
    for _ in range(30):
        sends = [choice.randrange(3) for _ in range(choice.randrange(2, 12))]
        asked = choice.sample(sends, len(sends))
        plans.append((sends, [(tag, backend != "gloo" and choice.random() < 0.3) for tag in asked]))

    def program(comm):
        for sends, receives in plans:
            ordered(comm, sends, receives, size)

    run_ranks(program, 2, backend=backend)
