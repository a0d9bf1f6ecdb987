"""Teams: communicators of some ranks that use the symmetric memory of all."""

import pytest
import torch

from unicomm import InvalidArgumentError, MismatchError, NotReadyError, UnsupportedError, symm
from unicomm.testing import run_ranks


def split(comm, groups):
    """This rank's part, or None."""
    return next((comm.split(g, f"part{g[0]}") for g in groups if comm.get_rank() in g), None)


@pytest.mark.parametrize(
    "groups", [[[0, 2], [1, 3]], [[3, 2, 1]], [[2]], [[0, 1], [2, 3]], [[1, 3]], [[0, 1, 2, 3]]], ids=str
)
def test_a_team_works_on_the_memory_of_all(groups):
    def program(comm):
        me = comm.get_rank()
        symm.init(comm)
        x = symm.empty(8, comm=comm)
        out = symm.empty(8, comm=comm)
        splits = symm.empty(4, dtype=torch.int64, comm=comm)
        there = symm.empty(2, 4, dtype=torch.int64, comm=comm)
        x.copy_(torch.arange(8.0) + 100 * me)
        comm.barrier(False)
        team = split(comm, groups)
        symm.init_team(team, comm)
        if team is not None:
            ranks, place, n = team.get_ranks(), team.get_rank(), team.get_size()
            total = symm.one_shot_all_reduce(x, team)
            assert total.tolist() == [n * i + 100 * sum(ranks) for i in range(8)]
            if 8 % n == 0:
                symm.all_to_all(x, out, team)
                part = 8 // n
                assert out.tolist() == [100 * r + place * part + i for r in ranks for i in range(part)]
            came = symm.all_to_all_v(x, out, [1] * n, team)
            assert came == [1] * n
            assert out[:n].tolist() == [100 * r + place for r in ranks]
            if 4 % n == 0:
                splits.fill_(1)
                symm.all_to_all_vdev_2d(
                    x[:4].view(4, 1), out.view(8, 1), splits[:n], there.view(-1)[: 2 * n].view(2, n), team
                )
                assert there.view(-1)[:n].tolist() == [1] * n
            symm.put(x[:1], (place + 1) % n, team)
            team.barrier(False)
            symm.broadcast(x, n - 1, team)
            assert x[1].item() == 1 + 100 * ranks[-1]
            team.finalize()
        # All go on with the whole; what a team did shows.
        comm.barrier(False)
        symm.broadcast(x, 0, comm)
        symm.free(out, comm)
        comm.barrier(False)
        return x[1].item()

    got = run_ranks(program, 4)
    zero = next((g[-1] for g in groups if 0 in g), 0)
    assert got == [1 + 100 * zero] * 4


def test_two_teams_of_the_same_ranks_and_many_operations():
    def program(comm):
        symm.init(comm)
        x = symm.empty(4, comm=comm)
        teams = []
        for i in range(2):
            teams.append(split(comm, [[0, 2], [1, 3]]))
            symm.init_team(teams[i], comm)
        for step in range(40):
            x.fill_(step + comm.get_rank())
            team = teams[step % 2]
            wanted = 2 * step + 2 * (comm.get_rank() % 2) + 2
            assert symm.one_shot_all_reduce(x, team)[0].item() == wanted
            if step % 10 == 0:
                assert symm.one_shot_all_reduce(x, comm)[0].item() == 4 * step + 6

    run_ranks(program, 4)


def test_what_is_no_team(raised):
    def program(comm):
        me = comm.get_rank()
        error = raised(symm.init_team, None, comm)
        assert isinstance(error, NotReadyError)
        symm.init(comm)
        uneven = split(comm, [[0, 1, 3]])
        error = raised(symm.init_team, uneven, comm)
        assert isinstance(error, MismatchError if me == 2 else InvalidArgumentError), error
        if me != 2:
            assert "evenly spaced" in error.message
        own = split(comm, [[0, 1], [2, 3]])
        symm.init(own)
        error = raised(symm.init_team, own, comm)
        assert isinstance(error, InvalidArgumentError)
        assert "already" in error.message
        # And all can go on.
        x = symm.empty(4, comm=comm)
        pair = split(comm, [[0, 1], [2, 3]])
        symm.init_team(pair, comm)
        for call in (
            lambda: symm.empty(4, comm=pair),
            lambda: symm.free(x, pair),
            lambda: symm.rendezvous(x, pair),
        ):
            error = raised(call)
            assert isinstance(error, UnsupportedError), error
            assert "a team has neither memory" in error.message
            assert "'ranks'" in error.hint
        symm.free(x, comm)
        error = raised(symm.one_shot_all_reduce, x, pair)
        assert "was freed" in error.message
        own.finalize()
        pair.finalize()

    run_ranks(program, 4)


def test_the_library_may_have_no_teams(raised, monkeypatch):
    from unicomm.backends.shm import ShmBackend

    whole = ShmBackend.symmetric_table
    without = ~int(symm.Capability.TEAMS)
    monkeypatch.setattr(
        ShmBackend, "symmetric_table", lambda self, *_: whole(self).limited(without & ((1 << 64) - 1))
    )

    def program(comm):
        symm.init(comm)
        return raised(symm.init_team, None, comm)

    for error in run_ranks(program, 2):
        assert isinstance(error, UnsupportedError)
        assert "teams" in error.message
