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
