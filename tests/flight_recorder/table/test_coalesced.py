"""Dumps of torch's NCCL groups with uneven and coalesced collectives: several entries with one number."""

import argparse
import copy
import pickle

import numpy as np
import pytest

from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.flight_recorder.corpus.coalesced_calls import uneven_training
from unicomm.flight_recorder.corpus.nccl_dump import nccl_dump
from unicomm.flight_recorder.table.load import load

SIZES = [[3], [5]]


def entry(number, name, shape, done=None, p2p=0, seq=1):
    """One entry as torch writes it; `done` is None for a call inside a coalesced collective."""
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "p2p_seq_id": p2p,
        "op_id": number + 1,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 1_700_000_000_000_000_000 + number * 1000,
        "input_sizes": [shape] if shape else [],
        "input_dtypes": ["Float"] if shape else [],
        "output_sizes": [shape] if shape else [],
        "output_dtypes": ["Float"] if shape else [],
        "state": {None: "scheduled", False: "started", True: "completed"}[done],
        "time_discovered_started_ns": None if done is None else 1_700_000_000_000_100_000,
        "time_discovered_completed_ns": 1_700_000_000_000_200_000 if done else None,
        "retired": bool(done),
        "timeout_ms": 600000,
        "is_p2p": bool(p2p),
        "frames": [{"name": "step", "filename": "/job/train.py", "line": 12}],
        "thread_id": "1",
        "thread_name": "pt_main_thread",
    }


def uneven(sizes=SIZES, done=True):
    """The entries of an uneven reduce_scatter and an uneven all_gather."""
    out = [entry(i, "_reduce_oop", s) for i, s in enumerate(sizes)]
    out.append(entry(len(out), "REDUCE_SCATTER_coalesced", [], done))
    out += [entry(len(out) + i, "_broadcast_oop", s, seq=2) for i, s in enumerate(sizes)]
    return [*out, entry(len(out), "ALLGATHER_coalesced", [], done, seq=2)]


def table_of(folder, *ranks):
    for rank, entries in enumerate(ranks):
        members = str(list(range(len(ranks))))
        dump = {
            "version": "2.10",
            "comm_lib_version": "2.27.5",
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": members}},
            "pg_status": {},
            "entries": entries,
        }
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    return load([folder])


def test_identical_ranks_are_healthy(tmp_path):
    table = table_of(tmp_path, uneven(), uneven())
    assert analyze(table).main.verdict is Verdict.GOOD
    rows = [(int(table.rank[r]), int(table.seq[r]), table.op_name(r)) for r in range(len(table))]
    assert rows == [(r, s, op) for r in (0, 1) for s, op in ((1, "reduce_scatter_v"), (2, "all_gather_v"))]
    calls = table.calls
    # A rank gets its own part of what is scattered, and gives its own part to the gather.
    assert [int(calls.out_numel[c]) for c in table.call[[0, 2]]] == [3, 5]
    assert [int(calls.in_numel[c]) for c in table.call[[1, 3]]] == [3, 5]
    assert [int(calls.in_numel[c]) for c in table.call[[0, 2]]] == [8, 8]
    assert all(int(table.completed_ns[r]) for r in range(len(table)))
    assert table.stack(0)[0].line == 12


def test_a_rank_with_other_parts_is_found(tmp_path):
    three = [[3], [5], [4]]
    wrong = uneven(three)
    wrong[2]["input_sizes"] = wrong[2]["output_sizes"] = [[6]]
    found = analyze(table_of(tmp_path, uneven(three), wrong, uneven(three)))
    main = found.main
    assert (main.verdict, main.culprits, main.seq_num) == (Verdict.SPLIT_MISMATCH, [1], 1)
    assert [s.what for s in main.sides] == [
        "reduce_scatter_v of parts 3, 5, 4",
        "reduce_scatter_v of parts 3, 5, 6",
    ]
    assert len(found.findings) == 1


def test_a_rank_with_another_collective_is_found(tmp_path):
    three = [[3], [5], [4]]
    other = [entry(0, "all_reduce", [8], True), *uneven(three)[4:]]
    main = analyze(table_of(tmp_path, uneven(three), other, uneven(three))).main
    assert (main.verdict, main.culprits) == (Verdict.WRONG_OPERATION, [1])


@pytest.mark.parametrize("kept", range(1, 6))
def test_overwritten_entries_are_not_judged(tmp_path, kept):
    """Only the newest entries of rank 1 are left: its first collective may lack some of its calls."""
    assert analyze(table_of(tmp_path, uneven(), uneven()[-kept:])).main.verdict is Verdict.GOOD


def test_a_rank_between_the_calls_of_a_collective_is_not_judged_by_them(tmp_path):
    """The dump was taken while rank 1 gave the calls to NCCL: rank 0 waits for it, and nothing differs."""
    begun = [*uneven()[:3], entry(3, "_broadcast_oop", [3], seq=2)]
    running = uneven()
    running[-1] = entry(5, "ALLGATHER_coalesced", [], done=False, seq=2)
    report = analyze(table_of(tmp_path, running, begun))
    assert [(f.verdict, f.culprits) for f in report.findings] == [(Verdict.NEVER_JOINED, [1])]


def test_messages_of_a_batch_have_its_state(tmp_path):
    around = [
        [entry(0, f"send {r}->{1 - r}", [4], p2p=1), entry(1, f"recv {r}<-{1 - r}", [4], p2p=1)]
        for r in (0, 1)
    ]
    over = [[*calls, entry(2, "coalesced", [], True, p2p=1)] for calls in around]
    assert analyze(table_of(tmp_path, *over)).main.verdict is Verdict.GOOD
    stuck = [[*calls, entry(2, "coalesced", [], False, p2p=1)] for calls in around]
    stuck[1].pop(0)
    found = analyze(table_of(tmp_path, *stuck)).main
    assert (found.verdict, found.culprits) == (Verdict.UNMATCHED_P2P, [1])


def test_mixed_calls_are_one_collective(tmp_path):
    def rank(size):
        return [
            entry(0, "all_reduce", [7]),
            entry(1, "broadcast", [size]),
            entry(2, "coalesced", [], True),
        ]

    assert analyze(table_of(tmp_path, rank(5), rank(5), rank(5))).main.verdict is Verdict.GOOD
    main = analyze(table_of(tmp_path, rank(5), rank(6), rank(5))).main
    assert (main.verdict, main.culprits, main.operation) == (
        Verdict.SIZE_MISMATCH,
        [1],
        "all_reduce+broadcast",
    )


def test_torch_reads_the_simulated_dumps(capsys):
    """torch's analyzer takes the entries of the corpus for coalesced collectives that match."""
    from torch.distributed.flight_recorder.components.builder import build_db

    job = uneven_training(2, 2).run()
    dumps = {f"rank_{r}": {**copy.deepcopy(nccl_dump(job, r)), "rank": r} for r in (0, 1)}
    for dump in dumps.values():  # torch cannot match a batch beside a collective with the same number
        dump["entries"] = [e for e in dump["entries"] if not e["is_p2p"]]
    options = argparse.Namespace(
        verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10
    )
    found = build_db(dumps, options, "2.10")
    assert len(found.collectives) == 8
    assert all(c.pass_check for c in found.collectives)


def test_damaged_entries_are_read_without_an_error(tmp_path):
    rng = np.random.default_rng(5)
    for _ in range(50):
        entries = [uneven()[i] for i in rng.permutation(6)[: int(rng.integers(1, 6))]]
        for one in entries:
            if rng.random() < 0.3:
                one["collective_seq_id"] = int(rng.integers(-2, 3))
            if rng.random() < 0.2:
                one["input_sizes"] = []
        assert analyze(table_of(tmp_path, uneven(), entries)).findings
