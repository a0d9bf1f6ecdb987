"""Some of torch's own tests, with the switch on shared memory; `make compat` runs all of them."""

import pytest

from tests.compat import torch_runner

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
@pytest.mark.timeout(300)
def test_torchs_own_tests_pass_with_the_switch():
    pytest.importorskip("expecttest", reason="torch's tests need it")
    outcomes = {
        one["test"]: one | torch_runner.killed("shm", one)
        for one in torch_runner.run_tests("shm", 3, "fork", TESTS)
    }
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
