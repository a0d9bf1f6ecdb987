"""Rehearsals with `meta`: models larger than the memory; operations and verdicts as without it."""

import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from tests.processes.forked_interpreters import run
from tests.rehearse.corpus_programs import FOLDER, programs, wrong
from tests.rehearse.test_rehearsals import PATIENCE, PROGRAMS, rehearsed
from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.rehearse.forecast.topology import load
from unicomm.rehearse.rehearsal import rehearse

pytestmark = pytest.mark.processes
SMALL = 1024  # bytes: tensors of small programs are hollow, too
LIMIT = "400"  # MB that a program may add to its process
CORPUS = {program.name: program for program in programs()}


def operations(done):
    """Returns how often each rank issued each operation, with its sizes and line."""
    table = done.table
    return Counter((int(table.rank[row]), table.describe(row)) for row in range(len(table)))


def remarks(done, part):
    return [remark for remark in done.report.remarks if part in remark.message]


@pytest.mark.parametrize("shared", [1, 2])
def test_a_model_larger_than_the_memory(shared):
    width, blocks = 16384, 2  # 7.5 billion parameters, 30 GB
    arguments = (str(width), str(blocks), str(shared), LIMIT, "2048")
    done = rehearsed("large_transformer", 4, arguments=arguments, meta=True, simulate_cuda=True)
    assert done.good, (done.unusable, done.report.findings, done.output)
    assert {"all_gather_single", "reduce_scatter_single"} <= set(done.table.ops)


def test_the_model_does_not_fit_without_the_option():
    done = rehearsed("large_transformer", 1, arguments=("4096", "2", "1", LIMIT, "2048"), simulate_cuda=True)
    finding = done.report.findings[0]
    assert finding.verdict is Verdict.EXCEPTION
    assert f"are more than {LIMIT}" in finding.sentence


@pytest.mark.parametrize(
    ("program", "ranks", "arguments"),
    [
        ("last_batch", 4, ()),
        ("rank_zero_only", 4, ()),
        ("crossed_sends", 2, ()),
        ("objects", 4, ()),
        ("three_dimensional", 8, ("2", "2", "2", "2")),
        ("ddp_on_a_device", 2, ("cpu",)),
        # Few tokens: where bfloat16 is emulated, 2048 of them take minutes.
        ("large_transformer", 4, ("256", "2", "2", "1000000", "64")),
    ],
)
def test_operations_verdicts_and_bytes_are_those_of_a_rehearsal_that_computes(program, ranks, arguments):
    topology, more = load("8xH100+400G"), {"arguments": arguments, "simulate_cuda": True}
    with_data = rehearsed(program, ranks, topology=topology, **more)
    without = rehearsed(program, ranks, topology=topology, meta=True, hollow_from=SMALL, **more)
    assert not with_data.unusable
    assert not without.unusable
    found = [
        [(f.verdict, f.culprits, f.sentence) for f in done.report.findings] for done in (with_data, without)
    ]
    assert found[0] == found[1]
    assert operations(with_data) == operations(without)
    traffic = [
        [(one.groups, one.size, one.operations, one.bytes) for one in done.forecast.traffic]
        if done.forecast
        else 0
        for done in (with_data, without)
    ]
    assert traffic[0] == traffic[1]
    assert remarks(without, "--meta computes nothing")
    assert not remarks(with_data, "--meta")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "ddp_uneven_batches",
            "fsdp_full_state_on_rank_zero",
            "good_ddp_buckets_and_hook",
            "good_fsdp_hybrid",
        ),
        *("good_functional", "good_moe_counts_exchanged", "good_pp_interleaved", "tp_gather_before_reduce"),
    ],
)
def test_the_corpus_is_judged_alike(name):
    done = rehearse(FOLDER / f"{name}.py", 8, patience=PATIENCE, meta=True, hollow_from=SMALL)
    assert wrong(CORPUS[name], done, 8) == ""


def test_objects_keep_their_data_and_hollow_tensors_in_them_their_layout():
    def program():
        dist.init_process_group("gloo")
        text = "x" * 300_000 if dist.get_rank() == 0 else ""
        sent = [{"text": text, "tensor": torch.ones(3000, 2000, dtype=torch.float16)}]
        dist.broadcast_object_list(sent, 0)
        assert len(sent[0]["text"]) == 300_000
        assert sent[0]["tensor"].shape == (3000, 2000)
        assert sent[0]["tensor"].dtype == torch.float16

    done = rehearsed(program, 2, meta=True)
    assert done.good, (done.report.findings, done.output)


def test_a_shape_that_depends_on_data_is_one_sentence_with_its_line():
    def program():
        dist.init_process_group("gloo")
        tokens = torch.randn(1000, 1000)
        tokens[tokens > 0].sum()

    done = rehearsed(program, 2, meta=True)
    line = program.__code__.co_firstlineno + 3
    assert "depends on values of a large tensor, which --meta does not compute" in done.unusable
    assert f"{__file__}:{line}" in done.unusable


def test_reads_of_values_that_are_not_computed_are_remarks():
    def program():
        dist.init_process_group("gloo")
        large = torch.randn(1000, 1000)
        if large.sum() > 3:
            dist.barrier()
        large[0, 0].item()
        torch.ones(10).sum().item()

    done = rehearsed(program, 2, meta=True)
    first = program.__code__.co_firstlineno
    found = remarks(done, "depends on data that --meta does not compute (2 ranks)")
    assert {remark.path for remark in found} == {f"{__file__}:{first + 3}", f"{__file__}:{first + 5}"}


def test_arguments_that_contradict_each_other():
    with pytest.raises(ValueError, match="real values need the ranks' data"):
        rehearse("x.py", 2, meta=True, real_values=True)


def test_the_command():
    command = [
        sys.executable,
        "-m",
        "unicomm",
        "rehearse",
        "--nproc-per-node",
        2,
        "--meta",
        "--simulate-cuda",
    ]
    done = run([*command, PROGRAMS / "large_transformer.py", "16384", "1", "1", LIMIT, "2048"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All good" in done.stdout
    done = run([*command, "--values", "real", PROGRAMS / "objects.py"])
    assert done.returncode == 2
    assert "real values need the ranks' data" in done.stderr
