"""Custom operators that take process groups and communicators, under torch.compile."""

import json
import re

import pytest

from tests.c10d.launch import forked
from tests.old_torch import not_with_old_torch


@pytest.mark.processes
@pytest.mark.timeout(240)
@not_with_old_torch("has no custom operators that take process groups")
@pytest.mark.parametrize(("program", "checks"), [("functional.py", 8), ("functional_compiled.py", 7)])
def test_compiled(forked_programs, program, checks):
    done = forked(forked_programs, 2, program, TORCH_DISTRIBUTED_USE_TORCHCOMMS="1")
    said = [json.loads(text) for text in re.findall(r'\{"results": .*?\}\}', done.stdout)]
    assert len(said) == 2, done.stdout[-3000:] + done.stderr[-6000:]
    for rank in said:
        assert {k: v for k, v in rank["results"].items() if v != "ok"} == {}
        assert len(rank["results"]) == checks
