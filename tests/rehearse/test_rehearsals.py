"""Programs that are rehearsed: real torch.distributed programs, as forked ranks and by the command."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes.forked_interpreters import run
from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.rehearse.github import to_annotations
from unicomm.rehearse.play import Rules
from unicomm.rehearse.rehearsal import rehearse, sample_of

pytestmark = pytest.mark.processes
PROGRAMS = Path(__file__).parent / "programs"
PATIENCE = 90.0


def rehearsed(program, ranks=4, **more):
    path = program if callable(program) else PROGRAMS / f"{program}.py"
    return rehearse(path, ranks, real_values=False, patience=PATIENCE, **more)


def line_of(program, text):
    lines = (PROGRAMS / f"{program}.py").read_text().splitlines()
    return f"{PROGRAMS / program}.py:{next(i for i, line in enumerate(lines, 1) if text in line)}"


@pytest.mark.parametrize(
    ("program", "verdict", "culprits", "line"),
    [
        ("last_batch", Verdict.WRONG_OPERATION, [3], "dist.barrier()"),
        ("rank_zero_only", Verdict.WRONG_OPERATION, [0], "dist.all_reduce(mean)"),
    ],
)
def test_faulty_programs(program, verdict, culprits, line):
    done = rehearsed(program)
    finding = done.report.findings[0]
    assert (finding.verdict, finding.culprits) == (verdict, culprits)
    assert line_of(program, line) in [side.where for side in finding.sides if culprits == side.ranks]
    place = line_of(program, line).rpartition(":")
    assert f"file=tests/rehearse/programs/{program}.py,line={place[2]}" in to_annotations(done.report)


def test_crossed_sends_hang_as_rendezvous_and_not_when_buffered():
    done = rehearsed("crossed_sends", 2)
    assert [finding.verdict for finding in done.report.findings] == [Verdict.WAIT_CYCLE]
    where = {edge.where for edge in done.report.findings[0].edges}
    assert where == {line_of("crossed_sends", "dist.send")}
    assert rehearsed("crossed_sends", 2, rules=Rules(buffered=True)).good


def test_objects_groups_messages_and_own_communicators():
    done = rehearsed("objects")
    assert done.good, (done.report.findings, done.output)
    assert done.ranks == range(4)


def test_three_dimensions():
    done = rehearsed("three_dimensional", 8, arguments=("2", "2", "2", "1"))
    assert done.good, (done.report.findings, done.output)
    assert {group.size for group in done.table.groups} == {2, 8}
    names = set(done.table.ops)
    assert {"all_gather_single", "reduce_scatter_single", "send", "recv", "all_reduce"} <= names


def test_a_sample_of_many_ranks():
    done = rehearsed("three_dimensional", 4 * 16 * 4, arguments=("4", "16", "4", "1"), sample=True)
    assert done.good, (done.report.findings, done.output)
    assert len(done.ranks) == 4 * 3 * 3  # all stages of the pipeline
    assert {0, 1, 3, 4, 5, 7, 60, 64, 128, 192} <= set(done.ranks)
    assert any("no file of" in remark.message for remark in done.report.remarks)


def test_the_sample_of_a_job_without_a_mesh():
    def program():
        dist.init_process_group("gloo")
        dist.barrier()

    done = rehearsed(program, 6)
    assert done.good
    assert sample_of(done.table, 6) == [0, 1, 5]


def test_a_function_with_a_branch_on_received_data_is_named():
    def program():
        dist.init_process_group("gloo")
        flag = torch.ones(1)
        dist.all_reduce(flag)
        if flag > 0:
            dist.barrier()

    done = rehearsed(program, 2)
    assert done.good
    found = [r for r in done.report.remarks if "a branch depends on received data" in r.message]
    assert [remark.path.rpartition(":")[0] for remark in found] == [__file__]


def test_an_exception_of_one_rank_is_the_verdict():
    def program():
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError("bad batch 7")
        dist.barrier()

    finding = rehearsed(program, 3).report.findings[0]
    assert (finding.verdict, finding.culprits) == (Verdict.EXCEPTION, [1])
    assert "bad batch 7" in finding.sentence


def test_exit_codes_that_no_system_has_end_the_rank():
    def program():
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(3))
        sys.exit(1 << 31)

    parent = os.getpid()
    done = rehearsed(program, 2)
    assert os.getpid() == parent
    assert len(done.table) == 2


def test_groups_made_in_other_orders_and_used_alike_are_good():
    def program():
        dist.init_process_group("gloo")
        pairs = [[0, 1], [2, 3]]
        made = [dist.new_group(ranks) for ranks in pairs]
        mine = made[dist.get_rank() // 2]
        dist.all_reduce(torch.ones(1), group=mine)
        dist.destroy_process_group()

    assert rehearsed(program, 4).good


def test_another_list_of_members_is_found():
    def program():
        dist.init_process_group("gloo")
        ranks = [0, 1, 2] if dist.get_rank() < 2 else [0, 1, 2, 3]
        group = dist.new_group(ranks)
        dist.all_reduce(torch.ones(1), group=group)

    done = rehearsed(program, 4)
    assert not done.good
    assert not done.unusable


def test_programs_that_say_nothing():
    assert "no operation" in rehearsed(lambda: None, 2).unusable
    with pytest.raises(ValueError, match="3 ranks cannot be spread over 2 nodes"):
        rehearse("x.py", 3, nnodes=2)
    with pytest.raises(FileNotFoundError, match=r"no program missing\.py"):
        rehearse("missing.py", 2)


def test_a_program_for_a_gpu_gets_one_sentence():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")

    def program():
        torch.ones(1).cuda()

    done = rehearsed(program, 2, simulate_cuda=False)
    assert done.unusable.startswith("the program needs a GPU, and this machine has none. Both ranks raised")
    assert "no operation" in rehearsed(program, 2).unusable


def test_a_rank_that_does_not_end_is_named():
    def good():
        dist.init_process_group("gloo")
        dist.barrier()

    def program():
        dist.init_process_group("gloo")
        while dist.get_rank() == 1:
            pass

    began = time.monotonic()
    assert rehearsed(good, 2).good
    patience = max(3.0, 5 * (time.monotonic() - began))  # rank 0 must end in it, also on a busy machine
    done = rehearse(program, 2, patience=patience)
    assert done.unusable.startswith("rank 1 did not end in time")
    assert not done.good


@pytest.mark.parametrize("program", ["last_batch", "rank_zero_only", "crossed_sends"])
def test_a_real_run_fails_as_the_rehearsal_says(program, tmp_path):
    env = {**os.environ, "UNICOMM_BACKEND": "shm", "TORCHCOMM_TIMEOUT_SECONDS": "20"}
    told = tmp_path / "verdict.json"
    command = [sys.executable, "-m", "unicomm", "run", "--nproc-per-node", 4, "--verdict-file", told]
    done = run([*command, PROGRAMS / f"{program}.py"], env=env)
    assert done.returncode != 0
    said = rehearsed(program).report.findings[0]
    assert said.verdict.value in done.stdout + done.stderr
    assert said.verdict.value in told.read_text()


def test_the_command(tmp_path):
    command = [sys.executable, "-m", "unicomm", "rehearse", "--nproc-per-node", 3]
    page = tmp_path / "report.html"
    done = run([*command, "--json", "--html", page, PROGRAMS / "rank_zero_only.py"])
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["findings"][0]["verdict"] == "wrong-operation"
    assert "wrong-operation" in page.read_text()
    done = run([*command, PROGRAMS / "missing.py"])
    assert done.returncode == 2
    assert "there is no program" in done.stderr
