"""reconfigure over the mock of NCCL: by shrinking and growing where the library can, else anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import unicomm
from tests.comms.membership.casts import SUM, Cast
from tests.mocks.nccl.kinds import of
from unicomm import AbortedError, CommTimeoutError, Communicator
from unicomm.backends.nccl.shrink_and_grow import Plan, plan_of

BACKENDS = ["nccl-new", "nccl-shrinks", "nccl-old", "rccl-old"]

# How the library comes from one list to the next: the calls that make a communicator, other than the first.
SHRINK, GROW, ANEW = {"ncclCommShrink"}, {"ncclCommGrow"}, {"ncclCommInitRankConfig"}
STEPS = {
    "shrink": ([0, 1, 2], [0, 2], SHRINK),
    "shrink without the first": ([0, 1, 2], [1, 2], SHRINK),
    "shrink to one": ([0, 1, 2], [1], SHRINK),
    "grow": ([0, 1], [0, 1, 2], GROW),
    "grow by two": ([1], [1, 0, 2], GROW),
    "replace": ([0, 1, 2], [0, 2, 3], SHRINK | GROW),
    "grow in front": ([0, 1], [2, 0, 1], ANEW),
    "renumber": ([0, 1, 2], [2, 0, 1], ANEW),
    "shrink and renumber": ([0, 1, 2], [2, 0], ANEW),
    "the same": ([0, 1], [0, 1], ANEW),
    "all others": ([0, 1], [2, 3], ANEW),
}


class NcclCast(Cast):
    """All of them write the library's log."""

    def __init__(self, backend: str, n: int, log: Any, **options: Any) -> None:
        of(backend)
        super().__init__(backend, n, **options)
        self._log, self._seen = log, 0

    def made(self) -> set[str]:
        """Functions that have made communicators since the last call of this."""
        lines = self._log.read_text().splitlines()
        fresh, self._seen = lines[self._seen :], len(lines)
        calls = [json.loads(line) for line in fresh]
        makers = ("ncclCommInitRank", "ncclCommShrink", "ncclCommGrow", "ncclCommSplit")
        return {call["function"] for call in calls if call["function"].startswith(makers)}

    def ended(self) -> tuple[int, int]:
        """How many communicators of the library were made in all, and how many have ended."""
        calls = [json.loads(line) for line in self._log.read_text().splitlines()]
        made = [c for c in calls if c["result"] in (0, 7) and c["function"] in SHRINK | GROW | ANEW]
        gone = [c for c in calls if c["function"] in ("ncclCommAbort", "ncclCommDestroy")]
        return len(made), sum(c["result"] == 0 for c in gone)


@pytest.fixture
def cast(tmp_path, monkeypatch) -> Iterator[Callable[..., NcclCast]]:
    log = tmp_path / "calls"
    monkeypatch.setenv("NCCL_MOCK_LOG", str(log))
    played: list[NcclCast] = []

    def make(*args: Any, **kwargs: Any) -> NcclCast:
        played.append(NcclCast(*args, log, **kwargs))
        return played[-1]

    yield make
    for one in played:
        one.finalize()
        made, gone = one.ended()
        assert made == gone  # each once, neither lost nor ended twice


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps(backend, step, cast):
    before, after, by = STEPS[step]
    if backend in ("nccl-old", "rccl-old") or (backend == "nccl-shrinks" and not by <= SHRINK):
        by = ANEW
    ranks = cast(backend, 4)
    ranks.become(before)
    assert ranks.made() == ANEW
    ranks.become(after)
    assert ranks.made() == by


@pytest.mark.parametrize("step", ["shrink", "grow", "grow by two", "replace"])
def test_steps_of_communicators_that_do_not_block(step, cast):
    """Calls of the library then return before there is a communicator, most of them with success."""
    before, after, by = STEPS[step]
    ranks = cast("nccl-new", 4, hints={"blocking": "0"})
    ranks.become(before)
    ranks.made()
    ranks.become(after)
    assert ranks.made() == by


def test_it_can_be_told_not_to(cast):
    ranks = cast("nccl-new", 3, hints={"reconfigure_by": "init"})
    ranks.become([0, 1, 2])
    ranks.become([0, 2])
    assert ranks.made() == ANEW


def test_many_steps(cast):
    ranks = cast("nccl-new", 4)
    for order in ([0], [0, 1], [0, 1, 2, 3], [1, 3], [1, 3, 0], [0, 1], [1, 0, 2], [0, 2, 3]):
        ranks.become(order)


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_timeout(backend, cast, raised):
    """The operation that nobody joined runs on, until the library revokes or ends the communicator."""
    ranks = cast(backend, 3)
    ranks.become([0, 1, 2])
    ranks.made()

    def late(comm: Communicator, _: int) -> Any:
        work = comm.all_reduce(torch.ones(3), SUM, True, timeout=0.3)
        return raised(work.wait_blocking)

    errors = ranks.play([0, 1], late)
    assert {type(error) for error in errors.values()} == {CommTimeoutError}, errors
    ranks.become([0, 1])
    assert ranks.made() == (SHRINK if backend == "nccl-new" else ANEW)


@pytest.mark.parametrize("backend", ["nccl-new", "nccl-old"])
def test_pending_works_end(backend, cast):
    ranks = cast(backend, 3)
    ranks.become([0, 1, 2])
    works = ranks.play([0, 1], lambda comm, _: [comm.all_reduce(torch.ones(9), SUM, True) for _ in range(3)])
    ranks.become([0, 1])
    for some in works.values():
        assert [type(work.exception()) for work in some] == [AbortedError] * 3


def test_after_an_abort(cast, raised):
    """Who has aborted joins the others like a newcomer, or by shrinking where it was left out."""
    ranks = cast("nccl-new", 3)
    ranks.become([0, 1, 2])
    ranks.made()
    ranks.comms[1].abort()
    assert type(raised(ranks.comms[1].barrier, False)) is AbortedError
    ranks.become([0, 1])
    assert ranks.made() == SHRINK  # for it was revoked only
    ranks.become([0, 1, 2])
    assert ranks.made() == GROW


def test_a_failed_attempt_is_followed_by_a_new_communicator(cast, raised):
    ranks = cast("nccl-new", 3)
    ranks.become([0, 1, 2])
    errors = ranks.play([0, 1], lambda comm, _: raised(comm.reconfigure, 50, ranks.handles, 0.5))
    assert {type(error) for error in errors.values()} == {CommTimeoutError}
    ranks.made()
    ranks.become([0, 1])
    assert ranks.made() == ANEW


def test_registered_memory_and_windows_belong_to_an_epoch(cast, raised):
    ranks = cast("nccl-new", 2)
    ranks.become([0, 1])

    def use(comm: Communicator, _: int) -> None:
        x = comm.mem_allocator.empty(64).fill_(1)
        comm.mem_allocator.tensor_register(x)
        window = comm.new_window(x)
        window.put(torch.ones(3), 1 - comm.get_rank(), 4, False)
        window.barrier()
        used.append(window)

    used: list[Any] = []
    assert ranks.play([0, 1], use) == {0: None, 1: None}
    ranks.become([0])
    ranks.become([0, 1])
    for window in used:
        assert isinstance(raised(window.signal, 0, False), unicomm.CommError)
    assert ranks.play([0, 1], use) == {0: None, 1: None}


def claims(*rows: Any) -> list[dict[str, Any]]:
    """(rank, size) or None for each new rank; all can do everything, and are of one clean epoch."""
    can = {"can": ["CommShrink", "CommGrow"]}
    return [can | ({"uid": "u", "rank": r[0], "size": r[1], "clean": True} if r else {}) for r in rows]


def test_plans():
    assert plan_of(claims((0, 3), (2, 3))) == Plan(2, (1,))
    assert plan_of(claims((0, 2), (1, 2), None)) == Plan(2, ())
    assert plan_of(claims((1, 2), None, None)) == Plan(1, (0,))
    assert plan_of(claims((1, 2), (0, 2))) is None
    assert plan_of(claims(None, (0, 1))) is None
    assert plan_of(claims(None, None)) is None
    assert plan_of(claims((0, 2), (1, 2))) is None
    two = claims((0, 3), (2, 3))
    assert plan_of([two[0], two[1] | {"uid": "of another epoch"}]) == Plan(1, (1, 2))  # it joins
    assert plan_of([two[0], two[1] | {"can": []}]) is None
    given_up = [one | {"clean": False} for one in claims((0, 3), (2, 3))]
    assert plan_of(given_up) == Plan(2, (1,))
    stuck = claims((0, 2), (1, 2), None)
    assert plan_of([stuck[0] | {"clean": False}, *stuck[1:]]) is None
