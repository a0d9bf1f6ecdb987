"""`dist.new_group` in all its forms while the switch is on, for members and other ranks."""

import re

import pytest

from tests.c10d.launch import forked


@pytest.mark.processes
@pytest.mark.parametrize(
    ("spelling", "backend"),
    [("gloo", "shm"), ("cpu:gloo", "auto"), ("none", "gloo"), ("unicomm", "auto")],
)
def test_new_group(forked_programs, spelling, backend):
    env = {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1", "UNICOMM_BACKEND": backend}
    done = forked(forked_programs, 4, "subgroups.py", spelling, **env)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = dict(re.findall(r"rank (\d) saw (\d+) groups", done.stdout))
    assert {rank: int(n) for rank, n in seen.items()} == {"0": 23, "1": 22, "2": 16, "3": 20}, seen


@pytest.mark.processes
def test_late_members_of_two_groups(forked_programs):
    """Who waits in one group is no member of the other one that waits elsewhere."""
    done = forked(forked_programs, 4, "late_members.py", 4)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(re.findall("rank .*", done.stdout)) == [
        *("rank 0 of [0, 1]: 1", "rank 1 of [0, 1]: 1", "rank 2 of [2, 3]: 5", "rank 3 of [2, 3]: 5"),
    ]
