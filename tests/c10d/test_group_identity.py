"""What tells groups apart: their names and their stores."""

from unicomm.c10d.group_names import members_name
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.testing import run_ranks


def test_groups_of_many_irregular_ranks_have_short_names_of_their_own():
    irregular = [16 * step + rank for step in range(128) for rank in range(8)]
    others = [16 * step + 8 + rank for step in range(128) for rank in range(8)]
    names = {members_name(ranks) for ranks in (irregular, others, irregular[:-1], range(1000), [3, 7])}
    assert len(names) == 5
    assert max(map(len, names)) <= 210
    assert members_name(irregular) == members_name(tuple(irregular))
    assert {"ranks 0-999", "ranks 3,7"} <= names


def test_groups_of_one_split_have_stores_of_their_own():
    def program(comm):
        group = UnicommProcessGroup(comm)
        mine = [0, 1] if comm.get_rank() < 2 else [2, 3]
        part = group.split_group(mine)
        store = part.get_group_store()
        store.set(f"from {part.rank()}", str(mine[0]))
        assert store.get(f"from {1 - part.rank()}").decode() == str(mine[0])
        group.get_group_store().set(f"whole {comm.get_rank()}", "x")
        assert not store.check([f"whole {comm.get_rank()}"])
        comm.barrier()
        part.get_comm().finalize()

    run_ranks(program, 4, backend="gloo")
