"""The judge of `make compat`: what fails with the switch alone counts, unless it is listed."""

import importlib.util
import json
import re
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.compat import frameworks, report, torch_runner
from tests.compat.outcomes import Log


def outcome(place, test, result, ranks=3):
    return {"place": place, "ranks": ranks, "test": test, "outcome": result, "error": "x"}


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / "log.jsonl")


@pytest.fixture
def listed(tmp_path, monkeypatch):
    path = tmp_path / "exceptions.json"
    path.write_text(json.dumps([{"tests": ["test_a", "test_b"], "backends": ["shm"], "reason": "of Gloo"}]))
    monkeypatch.setattr(report, "EXCEPTIONS", path)


def test_the_judge_counts_what_passes_on_stock_alone(log, listed, tmp_path):
    for one in (
        outcome("stock", "test_a", "passed"),
        outcome("shm", "test_a", "failed"),  # listed
        outcome("gloo", "test_a", "failed"),  # listed for shm only
        outcome("stock", "test_b", "passed"),
        outcome("shm", "test_b", "passed"),  # listed in vain
        outcome("stock", "test_c", "failed"),
        outcome("shm", "test_c", "failed"),  # not even stock can
        outcome("stock", "test_d", "passed", ranks=8),
        outcome("shm", "test_d", "skipped", ranks=8),
    ):
        log.add(one)
    verdict = report.judge(Log(log.path), Log(tmp_path / "none"))  # as the next run reads it
    assert verdict.unlisted == {"test_a": ["gloo"], "test_d": ["shm"]}
    assert verdict.stale == {"test_b": ["shm"]}
    assert verdict.listed == {"of Gloo": {"test_a": ["shm"]}}
    table = "\n".join(report.torch_table(log, verdict))
    assert "| 3 | 3 | 2 | 0 | 1 of 2 | 0 of 2 |" in table
    assert "2 more fail with the switch and are to be repaired:** `test_a` (gloo); `test_d` (shm)." in table


def test_the_list_of_exceptions_names_tests_of_torch_and_gives_reasons():
    spec = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    known = set(re.findall(r"def (test_\w+)", Path(spec.origin).read_text()))
    for (test, place), reason in report.exceptions().items():
        assert test in known
        assert place in torch_runner.PLACES[1:]
        assert len(reason) > 20


@pytest.mark.parametrize(
    ("losses", "weights", "said"),
    [
        ([1.0, 0.5], "w", ""),
        ([1.0, 0.5000000000000001], "w", "loss 1 is 0.5000000000000001, stock's is 0.5"),
        ([1.0], "w", "1 losses, stock has 2"),
        ([1.0, 0.5], "v", "the weights"),
    ],
)
def test_a_framework_passes_with_stocks_losses_and_weights_only(losses, weights, said):
    stock = {"losses": [1.0, 0.5], "weights": "w"}
    found = frameworks.difference({"losses": losses, "weights": weights}, stock)
    assert said in found.get("error", "")
    assert found.get("outcome", "passed") == ("failed" if said else "passed")


@pytest.mark.parametrize(
    ("place", "codes", "said"),
    [
        ("shm", [0, 0, 0], {}),
        ("shm", [0, -6, None], {"outcome": "failed", "error": "signal 6 ended rank 1"}),
        ("stock", [0, -6, 0], {}),
    ],
)
def test_a_rank_that_a_signal_ended_counts_with_the_switch(place, codes, said):
    assert torch_runner.killed(place, {"outcome": "passed", "exit codes": codes}) == said


PROGRAM = """
import json, sys
print("RESULT " + json.dumps({"losses": [1.0], "weights": "", "group": sys.argv[1]}))
"""


@pytest.mark.parametrize(
    ("place", "group", "outcome"),
    [
        ("stock", "ProcessGroup", "passed"),
        ("stock", "UnicommProcessGroup", "failed"),
        ("auto", "ProcessGroup", "failed"),
        ("auto", "UnicommProcessGroup", "passed"),
    ],
)
def test_a_framework_that_did_not_run_on_the_right_group_fails(tmp_path, place, group, outcome):
    (tmp_path / "program.py").write_text(PROGRAM)
    program = frameworks.Program("x", "torch", str(tmp_path / "program.py"), (sys.executable,), (group,))
    assert frameworks.run_program(program, place)["outcome"] == outcome


def test_tables_go_between_the_marks_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- x -->\nold\n<!-- end of x -->\nafter\n")
    report.write(page, {"x": iter(["new", "lines"])})
    assert page.read_text() == "before\n<!-- x -->\nnew\nlines\n<!-- end of x -->\nafter\n"
    report.write(page, {"x": iter(["again"])})
    assert page.read_text() == "before\n<!-- x -->\nagain\n<!-- end of x -->\nafter\n"


def test_a_framework_that_hangs_ends_with_all_its_processes(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    monkeypatch.setattr(frameworks, "DEADLINE", 3.0)
    program = frameworks.Program("x", "torch", str(tmp_path / "program.py"), (sys.executable,))
    found = frameworks.run_program(program, "stock")
    assert found["outcome"] == "failed"
    why, child, *_ = found["error"].splitlines()
    assert why == "not ready after 3 s"
    until = time.monotonic() + 30
    while is_running(int(child)):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_running(pid):
    """Whether a process exists and has not ended; nobody may have waited for it yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
