"""Both forms of a process group's methods give what they give on stock Gloo."""

import json

import pytest

from tests.c10d.launch import PROGRAMS, torchrun


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_both_forms(tmp_path, backend):
    results = {}
    for stock in (True, False):
        folder = tmp_path / str(stock)
        folder.mkdir()
        env = {} if stock else {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1", "UNICOMM_BACKEND": backend}
        done = torchrun(2, PROGRAMS / "forms.py", folder, stock=stock, **env)
        assert done.returncode == 0, done.stderr[-3000:]
        results[stock] = [json.loads((folder / str(rank)).read_text()) for rank in range(2)]
    assert results[False] == results[True]
    assert len(results[True][0]) > 15
