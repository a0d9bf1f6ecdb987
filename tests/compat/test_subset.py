"""A few of torch's own tests of torch.distributed, with the switch on shared memory; `make compat` runs all.

And the judge of `make compat`: what fails with the switch alone counts, unless it is listed.
"""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.compat import report, torch_runner
from tests.compat.outcomes import Log

TESTS = [
    "test_Backend_enum_class",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_object_subgroup",
    "test_all_reduce_complex_unsupported_ops",
    "test_batch_isend_irecv_gloo_tags",
    "test_ddp_create_graph",
    "test_destroy_group",
    "test_gather_checks",
    "test_get_future",
    "test_get_rank_size_group",
    "test_irecv",
    "test_scatter_complex",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_static_graph_api_cpu",
]


@pytest.mark.processes
def test_torchs_own_tests_pass_with_the_switch():
    pytest.importorskip("expecttest", reason="torch's tests need it")
    outcomes = {one["test"]: one for one in torch_runner.run_tests("shm", 3, "fork", TESTS)}
    assert sorted(outcomes) == sorted(TESTS)
    bad = {name: one["error"] for name, one in outcomes.items() if one["outcome"] != "passed"}
    assert not bad, "\n".join(f"{name}: {error}" for name, error in bad.items())


def test_a_test_that_ends_its_process_fails_and_the_next_one_runs(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os, sys\n"
        "for name in sys.argv[2:]:\n"
        "    if name == 'bad': print('what happened', flush=True); os._exit(7)\n"
        "    open(sys.argv[1], 'a').write(json.dumps({'test': name, 'outcome': 'passed'}) + '\\n')\n"
    )
    monkeypatch.setattr(torch_runner, "WORKER", [str(worker)])
    found = list(torch_runner.run_tests("stock", 3, "fork", ["good", "bad", "after"]))
    assert [(one["test"], one["outcome"]) for one in found] == [
        ("good", "passed"),
        ("bad", "failed"),
        ("after", "passed"),
    ]
    assert "code 7" in found[1]["error"]
    assert "what happened" in found[1]["error"]


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
    assert verdict.unlisted == ["test_a (gloo, 3 ranks)", "test_d (shm, 8 ranks)"]
    assert verdict.stale == ["test_b (shm)"]
    assert verdict.listed == {"of Gloo": ["test_a (shm)"]}
    table = "\n".join(report.torch_table(log, verdict))
    assert "| 3 | 3 | 2 | 0 | 1 of 2 | 0 of 2 |" in table
    assert "2 more fail with the switch" in table


def test_the_list_of_exceptions_names_tests_of_torch_and_gives_reasons():
    spec = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    known = set(re.findall(r"def (test_\w+)", Path(spec.origin).read_text()))
    for (test, place), reason in report.exceptions().items():
        assert test in known
        assert place in torch_runner.PLACES[1:]
        assert len(reason) > 20
    assert set(TESTS) <= known
