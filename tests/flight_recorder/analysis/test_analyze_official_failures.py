"""What torch's own analyzer gets wrong, each with our answer. All from dumps in torch's format."""

import json
import pickle
import subprocess
import sys

import pytest

from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.ring.call_path import user_frame
from unicomm.flight_recorder.table.load import load


def entry(number, op, size=4, state="completed", p2p=False, seq=None, dtype="Float"):
    began = 1_700_000_000_000_000_000 + number * 1_000_000
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 0 if p2p else number + 1 if seq is None else seq,
        "p2p_seq_id": (seq or 1) if p2p else 0,
        "op_id": number + 1,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": began,
        "input_sizes": [[size]],
        "input_dtypes": [dtype],
        "output_sizes": [[size]],
        "output_dtypes": [dtype],
        "state": state,
        "time_discovered_started_ns": began,
        "time_discovered_completed_ns": began + 500_000 if state == "completed" else None,
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": p2p,
        "frames": [{"name": "step", "filename": "/job/train.py", "line": 10 + number % 2}],
        "thread_id": "1",
        "thread_name": "python",
    }


def dump(entries, ranks=4):
    listed = json.dumps(list(range(ranks)))
    return {
        "version": "2.10",
        "comm_lib_version": "",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": listed}},
        "pg_status": {},
        "entries": entries,
    }


def write(folder, dumps, name="rank_{}"):
    folder.mkdir(exist_ok=True)
    for rank, data in dumps.items():
        (folder / name.format(rank)).write_bytes(pickle.dumps(data))


def main_of(folder):
    report = analyze(load([folder]))
    return report.main.verdict.value, report.main.culprits, report


HEALTHY = [entry(i, "all_reduce") for i in range(6)]


@pytest.mark.parametrize("guilty", [0, 3])
@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"op": "all_gather"}, "wrong-operation"),
        ({"size": 5}, "size-mismatch"),
        ({"dtype": "Half"}, "dtype-mismatch"),
    ],
)
def test_the_majority_is_right_whoever_is_read_first(tmp_path, guilty, change, verdict):
    dumps = {}
    for rank in range(4):
        last = {"op": "all_reduce", "state": "started", **(change if rank == guilty else {})}
        dumps[rank] = dump([*HEALTHY, entry(6, **last)])
    write(tmp_path / "d", dumps)
    found, culprits, _ = main_of(tmp_path / "d")
    assert (found, culprits) == (verdict, [guilty])


def test_a_lone_message_in_a_group_of_four_is_no_missing_rank(tmp_path):
    pair = {
        0: entry(6, "send 0->1", p2p=True),
        1: entry(6, "recv 1<-0", p2p=True),
    }
    dumps = {r: dump([*HEALTHY, *([pair[r]] if r in pair else [])]) for r in range(4)}
    write(tmp_path / "d", dumps)
    assert main_of(tmp_path / "d")[0] == "all-good"


def test_a_lone_send_is_that(tmp_path):
    dumps = {r: dump(HEALTHY) for r in range(4)}
    dumps[0] = dump([*HEALTHY, entry(6, "send 0->1", p2p=True, state="started")])
    write(tmp_path / "d", dumps)
    found, culprits, report = main_of(tmp_path / "d")
    assert (found, culprits) == ("unmatched-send-or-recv", [1])
    assert report.main.victims == [0]


def test_a_message_with_the_number_of_a_collective_is_no_part_of_it(tmp_path):
    """torch's analyzer ends with an assertion there."""
    pair = {
        0: entry(6, "send 0->1", p2p=True, seq=6),
        1: entry(6, "recv 1<-0", p2p=True, seq=6),
    }
    dumps = {r: dump([*HEALTHY, *([pair[r]] if r in pair else [])]) for r in range(4)}
    write(tmp_path / "d", dumps)
    assert main_of(tmp_path / "d")[0] == "all-good"


def two_groups(rank):
    """Ranks 0 and 1 enter groups "a" and "b" in opposite order."""
    first = "a" if rank == 0 else "b"
    last = entry(6, "all_reduce", state="started", seq=1) | {"process_group": (first, "")}
    data = dump([*HEALTHY, last], 2)
    data["pg_config"] |= {name: {"name": name, "desc": "", "ranks": "[0, 1]"} for name in "ab"}
    return data


def test_a_deadlock_across_groups_is_a_cycle(tmp_path):
    write(tmp_path / "d", {0: two_groups(0), 1: two_groups(1)})
    found, culprits, report = main_of(tmp_path / "d")
    assert (found, culprits) == ("wait-cycle-across-groups", [0, 1])
    assert [(e.rank, e.waits_for, e.where) for e in report.main.edges] == [
        (0, [1], "/job/train.py:10"),
        (1, [0], "/job/train.py:10"),
    ]


def test_who_is_always_late_is_named(tmp_path):
    dumps = {}
    for rank in range(4):
        entries = [entry(i, "all_reduce") for i in range(40)]
        if rank == 2:
            for e in entries:
                e["time_created_ns"] += 400_000
        dumps[rank] = dump(entries)
    write(tmp_path / "d", dumps)
    assert main_of(tmp_path / "d")[:2] == ("alive-but-slow", [2])


@pytest.mark.parametrize(
    "name", ["node17-gpu4.cluster_rank_{}.pkl", "trace-host9-{}", "{}.dump", "nccl_trace_rank_{}"]
)
def test_names_of_files_and_a_missing_dump(tmp_path, name):
    dumps = {
        r: dump([*HEALTHY, *([entry(6, "all_reduce", state="started")] if r != 1 else [])]) for r in (0, 1, 3)
    }
    write(tmp_path / "d", dumps, name)
    found, culprits, report = main_of(tmp_path / "d")
    assert (found, culprits) == ("never-joined", [1])
    assert report.missing == [2]
    assert "no file of rank 2" in [f.message for f in report.remarks]


class Evil:
    def __reduce__(self):
        return (open, ("/tmp/pwned-by-a-dump", "w"))


def test_nothing_in_a_pickle_is_run(tmp_path):
    write(tmp_path / "d", {r: dump(HEALTHY) for r in range(3)})
    (tmp_path / "d" / "rank_3").write_bytes(pickle.dumps({"entries": [Evil()]}))
    _, _, report = main_of(tmp_path / "d")
    [finding] = [f for f in report.remarks if f.path]
    assert finding.path.endswith("rank_3")


def test_json_and_other_backends(tmp_path):
    """JSON, and backends that torch's analyzer does not know."""
    (tmp_path / "d").mkdir()
    for rank in range(4):
        last = [] if rank == 3 else [entry(6, "all_reduce", state="started")]
        data = dump([*HEALTHY, *last])
        for e in data["entries"]:
            e["profiling_name"] = e["profiling_name"].replace("nccl", "mpi")
        (tmp_path / "d" / f"rank{rank}.json").write_text(json.dumps(data))
    found, culprits, report = main_of(tmp_path / "d")
    assert (found, culprits) == ("never-joined", [3])
    assert report.formats == {"JSON": 4}


def test_gloos_own_dump(tmp_path):
    """All entries are "scheduled", and the group "0" is configured as "": a KeyError in torch's analyzer."""
    code = """
import pickle, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
for _ in range(3):
    dist.all_reduce(torch.ones(3))
dist.barrier()
dump = torch._C._distributed_c10d._dump_fr_trace
while not all(e["retired"] for e in pickle.loads(dump(True, True, False))["entries"]):
    pass  # gloo's thread notes the end of an operation after the caller goes on
open(sys.argv[1], "wb").write(dump(True, True, False))
open(sys.argv[2], "wb").write(torch._C._distributed_c10d._dump_fr_trace_json(True, False))
"""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    paths = [str(tmp_path / "a" / "rank_0"), str(tmp_path / "b" / "rank_0.json")]
    subprocess.run([sys.executable, "-c", code, *paths], check=True, timeout=100)
    for name in ("a", "b"):
        table = load([tmp_path / name])
        assert [table.op_name(i) for i in range(len(table))] == ["all_reduce"] * 3 + ["barrier"]
        assert analyze(table).main.verdict.value == "all-good"
    assert user_frame(load([tmp_path / "a"]).stack(0)).file == "<string>"
