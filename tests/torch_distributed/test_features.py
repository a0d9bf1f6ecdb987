"""torch.distributed, feature by feature, on unicomm by the switch alone."""

import json
import re

import pytest
from launch import PROGRAMS, torchrun


def results(ranks, *arguments, **env):
    done = torchrun(ranks, PROGRAMS / "features.py", *arguments, **env)
    found = re.findall(r'\{"group": .*?\}\}', done.stdout)
    assert len(found) == ranks, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads(text) for text in found], done.stderr


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("backend", "ranks"), [("shm", 2), ("gloo", 2), ("auto", 4)])
def test_switched(backend, ranks):
    said, errors = results(ranks, TORCH_DISTRIBUTED_USE_TORCHCOMMS="1", UNICOMM_BACKEND=backend)
    for rank in said:
        assert rank["group"] == "UnicommProcessGroup"
        bad = {name: what for name, what in rank["results"].items() if what != "ok"}
        assert bad == {}
        assert len(rank["results"]) == 36
    assert f"now is unicomm '{backend}'" in errors
