"""Hooks that compress gradients, under DistributedDataParallel and FSDP2, on unicomm's groups and torch's."""

import json
import re

import pytest

from .launch import PROGRAMS, forked_torchrun

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("backend", ["unicomm", "gloo"])
def test_compressed_gradients(backend, parallel, tmp_path):
    for wire, bound in (("int8", 0.03), ("mxfp8", 0.15)):
        done = forked_torchrun(2, PROGRAMS / "compressed.py", backend, parallel, wire, str(tmp_path))
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(re.search("FOUND (.*)", done.stdout)[1])
        without, with_it = found["False"], found["True"]
        assert 0 < without["single"] < bound
        assert with_it["single"] < 2 * bound
        # What is lost in one step comes with the next, so the sum of all steps lacks one step's loss at most.
        assert with_it["total"] < without["total"]
        assert found["alike"]
        assert found["resumed total"] < without["total"]
        if parallel == "fsdp":  # DistributedDataParallel cuts its first buckets in another way
            assert found["resumed"] == with_it["bits"][3:]
        assert "compresses nothing" in found["plain"]
        assert "no state of a compressing hook" in found["damaged"]
