"""Dumps as torch's own groups write them: batches, numbers of the last Work, scatter, subgroups of Gloo."""

import pytest

from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.flight_recorder.formats.dump_columns import from_dump
from unicomm.flight_recorder.table.builder import TableBuilder

BEGAN_NS = 1_700_000_000_000_000_000
WORLD = ("0", "default_pg")


def entry(at, name, ins, outs=None, *, seq=0, p2p=0, state="completed", group=WORLD, **more):
    """One entry of ProcessGroupNCCL, or of torch's Gloo group if the name says so."""
    outs = ins if outs is None else outs
    created, over = BEGAN_NS + at * 1_000_000, state == "completed"
    return {
        "record_id": at,
        "pg_id": 0,
        "process_group": group,
        "collective_seq_id": seq,
        "p2p_seq_id": p2p,
        "op_id": at + 1,
        "profiling_name": name if ":" in name else f"nccl:{name}",
        "time_created_ns": created,
        "input_sizes": ins,
        "input_dtypes": ["Float"] * len(ins),
        "output_sizes": outs,
        "output_dtypes": ["Float"] * len(outs),
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": created + 500 if over else None,
        "retired": over,
        "timeout_ms": 600_000,
        "is_p2p": name.startswith(("send", "recv")),
        "frames": [{"name": "step", "filename": "/job/train.py", "line": 12}],
        "thread_id": "1",
        "thread_name": "",
    } | more


def findings(dumps, status=None, config=None):
    return [(one.verdict, one.culprits) for one in analyzed(dumps, status, config).findings]


def analyzed(dumps, status=None, config=None):
    builder, n = TableBuilder(), len(dumps)
    for rank, entries in enumerate(dumps):
        world = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(n)))}}
        dump = {"version": "2.10", "pg_config": config or world, "entries": entries}
        dump["pg_status"] = {"0": status[rank]} if status else {}
        builder.add_dump(from_dump(dump), f"nccl_trace_rank_{rank}", rank, "torch pickle")
    return analyze(builder.finish())


def numbers(last):
    return {f"last_{what}_collective": last for what in ("enqueued", "started", "completed")}


def ring_of_batches(rank, n, steps, stuck=()):
    """Steps of batch_isend_irecv and an all_reduce. The end of a batch has the flag of a collective."""
    out = []
    for step in range(1, steps + 1):
        for name in (f"send {rank}->{(rank + 1) % n}", f"recv {rank}<-{(rank - 1) % n}"):
            out.append(entry(len(out), name, [[8]], state="scheduled", p2p=step, seq=step - 1))
        hangs = step == steps and rank in stuck
        state = "started" if hangs else "completed"
        out.append(entry(len(out), "coalesced", [], [], state=state, p2p=step, seq=step - 1))
        if hangs:
            return out
        state = "started" if stuck and step == steps else "completed"
        out.append(entry(len(out), "all_reduce", [[100]], p2p=step, seq=step, state=state))
    return out


def test_batches_of_messages_end():
    assert findings([ring_of_batches(r, 4, 5) for r in range(4)]) == [(Verdict.GOOD, [])]
    # The link between ranks 0 and 1 hangs in the last batch; the others wait in the all_reduce behind it.
    first, *_ = findings([ring_of_batches(r, 4, 5, stuck=(0, 1)) for r in range(4)])
    assert first == (Verdict.NEVER_JOINED, [0, 1])


def test_the_number_of_a_message_is_no_number_of_a_collective():
    def program(rank, absent):
        out, p2p = [entry(0, "all_reduce", [[100]], seq=1)], 0
        for _ in range(20):
            for peer, name in (
                (rank + 1, f"send {rank}->{rank + 1}"),
                (rank - 1, f"recv {rank}<-{rank - 1}"),
            ):
                if 0 <= peer < 4:
                    p2p += 1
                    out.append(entry(len(out), name, [[8]], p2p=p2p, seq=1))
        if not absent:
            out.append(entry(len(out), "all_reduce", [[100]], p2p=p2p, seq=2, state="scheduled"))
        return out, numbers(p2p if absent else 2)

    dumps, status = zip(*(program(r, r == 2) for r in range(4)), strict=True)
    assert findings(dumps, status)[0] == (Verdict.NEVER_JOINED, [2])
    assert findings(dumps)[0] == (Verdict.NEVER_JOINED, [2])


@pytest.mark.parametrize("absent", [None, 3])
def test_scatter(absent):
    """ProcessGroupNCCL writes its output as input, and what the root scatters as outputs."""

    def program(rank):
        given = {"output_dtypes": ["Float"] * 4} if rank == 0 else {"output_dtypes": ["Undefined"]}
        out = [entry(0, "all_reduce", [[100]], seq=1)]
        if rank != absent:
            state = "completed" if absent is None else "scheduled"
            chunks = [[64]] * 4 if rank == 0 else [[0]]
            out.append(entry(1, "scatter", [[64]], chunks, seq=2, state=state, **given))
        return out

    found = findings([program(r) for r in range(4)])
    assert found == [(Verdict.GOOD, []) if absent is None else (Verdict.NEVER_JOINED, [absent])]


def test_subgroups_of_torchs_gloo():
    """Its dumps list one group without ranks, "", whatever groups there are."""

    def program(rank):
        own, out = str(1 + rank // 2), []
        for step in range(1, 4):
            for name, sizes, group in (
                ("gloo:all_gather", ([[7]], [[2, 7]]), (own, "undefined")),
                ("gloo:all_reduce", ([[100]], [[100]]), WORLD),
            ):
                done = {"time_discovered_completed_ns": None, "retired": True}
                out.append(entry(len(out), name, *sizes, seq=step, state="scheduled", group=group, **done))
        return out

    config = {"": {"name": "", "desc": "", "ranks": "[]"}}
    assert findings([program(r) for r in range(4)], config=config) == [(Verdict.GOOD, [])]


@pytest.mark.parametrize("absent", [None, 1])
def test_torchs_gloo_calls_failed_operations_over(absent):
    """All but one rank have timed out in the last all_reduce, which their dumps call retired."""

    def program(rank):
        names = ["all_reduce", "broadcast", "all_reduce"][: 2 if rank == absent else 3]
        done = {"time_discovered_completed_ns": None, "retired": True, "state": "scheduled"}
        return [entry(at, f"gloo:{name}", [[7]], seq=at + 1, **done) for at, name in enumerate(names)]

    status = [numbers(2 if rank == absent else 3) | {"last_started_collective": -1} for rank in range(3)]
    report = analyzed([program(r) for r in range(3)], status)
    if absent is None:
        assert report.main.verdict is Verdict.GOOD
        return
    (found,) = report.findings
    assert (found.verdict, found.culprits, found.confidence) == (Verdict.NEVER_JOINED, [absent], 0.5)
    assert "if the dumps are of several moments, it succeeded" in " ".join(found.evidence)
