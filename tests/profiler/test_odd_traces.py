"""Traces that are damaged, cut off, very large, of several runs or cycles, or rearranged by other tools."""

import gzip
import json
import random
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import profile_merge as generator
from tests.profiler.traces import decode, load, operations
from unicomm import new_comm
from unicomm.launch.cli import app
from unicomm.profiler import TraceError, annotate, chrome, merge, read_events, report
from unicomm.profiler.alignment import align
from unicomm.profiler.operation_columns import load_traces
from unicomm.profiler.trace_table import KEY


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Traces of 4 ranks x 400 events, 80 of them collectives; rank 2 is 3 ms late once."""
    return generator.generate(tmp_path_factory.mktemp("job"), 4, 400, 0.2, late=2)


def changed(path, target, change):
    """Returns a trace with a changed table or changed events."""
    trace = json.loads(path.read_text())
    change(trace)
    target.write_text(json.dumps(trace))
    return target


def test_a_cut_off_trace_is_found_before_any_work(job, tmp_path, monkeypatch):
    """Includes a trace with so many brackets near its end that trying each of them would not end."""
    text = job[3].read_text()
    for at, end in enumerate((text[:-40], text[: text.rindex("},")], text + "junk")):
        path = tmp_path / f"{at}.json"
        path.write_text(end)
        with pytest.raises(TraceError, match=rf"{at}\.json is no Chrome trace: it ends in the middle"):
            merge([*job[:3], path], tmp_path / "m.json")
    lists = ",".join(["[[1],[2]]"] * 2000)
    (tmp_path / "b.json").write_text('{"traceEvents": [{"ph": "X", "args": {"a": [' + lists + "]}}, {}: }}")
    tries = []
    real = chrome._parts.decode
    with chrome.Reader(tmp_path / "b.json") as reader:
        counting = type("Counting", (), {"decode": lambda _, text: tries.append(1) or real(text)})
        monkeypatch.setattr(chrome, "_parts", counting())
        with pytest.raises(TraceError, match="damaged there"):
            list(reader.pieces())
    assert tries == [1]


@pytest.mark.parametrize("how", ["cut", "flipped", "checksum"])
def test_damaged_compression_is_said(job, tmp_path, how):
    data = bytearray(gzip.compress(job[0].read_bytes()))
    if how == "cut":
        del data[len(data) // 2 :]
    elif how == "flipped":
        data[len(data) // 2 :: 50] = bytes(len(data[len(data) // 2 :: 50]))
    else:
        data[-8:] = bytes(8)
    path = tmp_path / "a.json.gz"
    path.write_bytes(data)
    for read in (
        lambda: merge([path], tmp_path / "m.json"),
        lambda: report([path]),
        lambda: read_events(path),
    ):
        with pytest.raises(TraceError, match=r"a\.json\.gz is no Chrome trace"):
            read()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("column", "value"),
    [("seq_num", "x"), ("seq_num", 1 << 70), ("op", 5), ("state", 9), ("group", -1), ("in_splits", None)],
)
def test_damaged_tables_are_said(job, tmp_path, column, value):
    def damage(trace):
        trace[KEY]["rows"][3][trace[KEY]["columns"].index(column)] = value

    path = changed(job[0], tmp_path / "a.json", damage)
    for read in (
        lambda: merge([path], tmp_path / "m.json"),
        lambda: report([path]),
        lambda: read_events(path),
    ):
        with pytest.raises(TraceError, match=r"a\.json: the table of operations is damaged"):
            read()


def test_a_missing_column_is_said(job, tmp_path):
    def rename(trace):
        trace[KEY]["columns"][0] = "operation"

    path = changed(job[0], tmp_path / "a.json", rename)
    with pytest.raises(TraceError, match="table of operations is damaged"):
        read_events(path)


def test_one_broken_trace_of_several_is_named(job, tmp_path):
    """A damaged trace is not taken for a ring of the flight recorder."""
    (tmp_path / "broken.json").write_text('{"traceEvents": [')
    with pytest.raises(TraceError, match=r"broken\.json is no Chrome trace"):
        report([*job, tmp_path / "broken.json"])


def test_several_recordings_of_one_rank(job, tmp_path):
    def of(**facts):
        return lambda trace: trace[KEY].update(facts)

    copy = changed(job[0], tmp_path / "copy.json", of())
    cycle = changed(job[0], tmp_path / "cycle.json", of(started_ns=generator.START + 10**9))
    restart = changed(job[0], tmp_path / "restart.json", of(pid=7))
    for path, why in (
        (copy, "the same recording twice"),
        (cycle, "of the same cycle"),
        (restart, "a restart"),
    ):
        with pytest.raises(TraceError, match=f"both of rank 0: .*{why}"):
            merge([*job, path], tmp_path / "m.json")


def test_traces_of_two_runs_are_not_compared_silently(job, tmp_path):
    """Ranks 2 and 3 are of another run: their communicators have other names."""

    def other_run(trace):
        for group in trace[KEY]["groups"]:
            group["uid"] = "other " + group["uid"]
        trace[KEY]["host"] = "elsewhere"

    paths = [*job[:2], *(changed(p, tmp_path / p.name, other_run) for p in job[2:])]
    done = merge(paths, tmp_path / "m.json")
    assert any("the offset between these clocks is not known" in r and "0-1; 2-3" in r for r in done.remarks)
    assert any("the offset between these clocks" in r for r in report(paths).remarks)
    told = CliRunner().invoke(app, ["profile", "merge", *map(str, paths), "-o", str(tmp_path / "m.json")])
    assert told.exit_code == 0
    assert "note: the offset between these clocks" in told.output
    assert merge(job, tmp_path / "m.json").remarks == []


def test_traces_of_two_cycles_are_not_compared_silently(job, tmp_path):
    """One machine and one communicator, but other sequence numbers: nothing can be joined."""

    def later(trace):
        for row in trace[KEY]["rows"]:
            row[1] += 1000

    paths = [job[0], job[1], changed(job[2], tmp_path / "a.json", later)]
    why = "no collective of rank 2 is in another trace: are the traces of one run and one cycle?"
    assert why in merge(paths, tmp_path / "m.json").remarks
    assert why in report(paths).remarks


def test_missing_ranks_are_said(job, tmp_path):
    done = merge([job[0], job[3]], tmp_path / "m.json")
    assert done.remarks == ["no trace of ranks 1-2: waiting for them is not shown"]
    assert done.flows == 80
    assert report([job[0]]).remarks == ["no trace of ranks 1-3: waiting for them is not shown"]


def test_a_folder_is_no_trace(job, tmp_path):
    with pytest.raises(TraceError, match=r"is a folder; give the traces in it: .*/\*\.json"):
        merge([tmp_path], tmp_path / "m.json")


def test_operations_beyond_the_limit_are_said(job, tmp_path):
    path = changed(job[0], tmp_path / "a.json", lambda trace: trace[KEY].update(dropped=7))
    assert "7 operations are missing: they were beyond what one recording holds" in report([path]).remarks


def pairwise_job(folder, clocks, rounds=30):
    """Ranks in a chain: each shares a communicator with the next rank only, and their clocks differ."""
    rng = random.Random(1)
    last = len(clocks) - 1
    for rank, clock in enumerate(clocks):
        rows, groups = [], []
        for first in (rank - 1, rank):
            if not 0 <= first < last:
                continue
            for k in range(rounds):
                at = generator.START + k * 10**7 + first * 10**5
                times = [at + clock, at + clock, at + 50_000 + clock + rng.randrange(1000)]
                rows.append(
                    [
                        "all_reduce",
                        k + 1,
                        len(groups),
                        1,
                        0,
                        *times,
                        3,
                        0,
                        1,
                        1,
                        "float32",
                        -1,
                        -1,
                        4,
                        "",
                        "",
                        0,
                    ]
                )
            name = {
                "uid": f"u{first}",
                "name": f"pair{first}",
                "description": "",
                "group_name": "",
                "backend": "shm",
            }
            groups.append(name | {"ranks": f"{first}-{first + 1}", "rank": rank - first, "size": 2})
        table = {"version": 1, "host": f"host{rank}", "pid": rank, "started_ns": generator.START + clock}
        table |= {"stopped_ns": generator.START + clock + 10**9, "dropped": 0, "groups": groups}
        # Each rank's widest group names it; both of its pairs are of one size.
        table |= {"columns": generator.COLUMNS, "rows": rows}
        trace = {KEY: table, "baseTimeNanoseconds": generator.START, "traceEvents": []}
        (folder / f"rank{rank}.json").write_text(json.dumps(trace))
    return [folder / f"rank{rank}.json" for rank in range(len(clocks))]


def test_clocks_of_hosts_that_are_joined_by_others_only(tmp_path):
    """Clocks that are seconds apart, along a chain of pairs: each is known through all before it."""
    clocks = [0, 5_000_000_000, -2_000_000_000, 40_000_000, 9_000_000_000, 123_456_789, -7_000_000, 0]
    files, found = load_traces(pairwise_job(tmp_path, clocks))
    assert [f.rank for f in files] == list(range(8))
    aligned = align(found)
    assert aligned.tied == [list(range(8))]
    for a, clock in enumerate(clocks):
        apart = aligned.offsets[a] - aligned.offsets[0]
        assert abs(apart - (clock - clocks[0])) < 8 * 1000  # completions scatter by 1 us


def test_ranks_of_one_machine_have_one_clock(tmp_path):
    """Differences among ranks of one machine are noise; the offset of two machines is found."""
    paths = generator.generate(tmp_path, 4, 400, 0.2)
    for rank, path in enumerate(paths):
        ahead = random.Random(rank).randrange(-5_000_000, 5_000_000)  # as the generator has it

        def move(trace, rank=rank, ahead=ahead):
            table = trace[KEY]
            table["clock"] = f"boot {rank // 2}"
            for row in table["rows"]:
                for at in range(5, 8):  # both ranks of the second machine are 1 s ahead
                    row[at] += 10**9 * (rank // 2) - ahead
                row[7] += 3000 * (rank % 2)  # and the odd ranks always leave later

        changed(path, path, move)
    _, found = load_traces(paths)
    aligned = align(found)
    offsets = aligned.offsets
    assert aligned.tied == [[0, 1, 2, 3]]
    assert (offsets[0], offsets[2]) == (offsets[1], offsets[3])
    assert abs(offsets[2] - offsets[0] - 10**9) < 3000
    assert set(align(load_traces(paths[:2])[1]).offsets.values()) == {0}


def test_the_clock_of_a_trace_is_that_of_the_machine(tmp_path):
    comm = new_comm("fake", torch.device("cpu"), rank=1, size=2, name="main")
    with torch.profiler.profile() as prof:
        comm.barrier(False)
    prof.export_chrome_trace(str(tmp_path / "a.json"))
    comm.finalize()
    boot = Path("/proc/sys/kernel/random/boot_id")
    assert json.loads((tmp_path / "a.json").read_text())[KEY]["clock"] == boot.read_text().strip()


def test_another_order_gives_no_wrong_labels(job, tmp_path):
    """A tool that sorts events by name or size: the k-th event of a thread is not known then."""

    def shuffle(trace):
        random.Random(3).shuffle(trace["traceEvents"])

    path = changed(job[0], tmp_path / "a.json", shuffle)
    merge([path], tmp_path / "m.json")
    merge([job[0]], tmp_path / "right.json")
    own = [e for e in load(tmp_path / "right.json")["traceEvents"] if e.get("cat") == "cpu_op"]
    right = {e["ts"]: e["args"].get("seq_num") for e in own if e["name"].startswith("unicomm::")}
    found = [e for e in load(tmp_path / "m.json")["traceEvents"] if e.get("cat") == "cpu_op"]
    labels = {e["ts"]: e["args"].get("seq_num") for e in found if e["name"].startswith("unicomm::")}
    assert labels.keys() == right.keys()
    first = min(labels)
    assert all(seq in (None, right[ts]) for ts, seq in labels.items() if ts == first)
    assert sum(seq is None for seq in labels.values()) > len(labels) // 2


def test_a_large_table_behind_the_events(job, tmp_path, monkeypatch):
    """Sorted keys, and a table of many blocks, are read completely."""
    monkeypatch.setattr(chrome, "_BLOCK", 1000)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(json.loads(job[0].read_text()), sort_keys=True))
    assert len(read_events(path)) == 80
    assert read_events(path) == read_events(job[0])


def test_a_base_behind_the_events(job, tmp_path):
    def last(trace):
        trace["baseTimeNanoseconds"] = trace.pop("baseTimeNanoseconds")

    path = changed(job[0], tmp_path / "a.json", last)
    assert read_events(path) == read_events(job[0])


def test_annotate_keeps_what_stands_behind_the_events(job, tmp_path):
    (tmp_path / "notes.json").write_text('{"version": 1, "kernels": {}}')
    path = tmp_path / "a.json"
    path.write_text(json.dumps(json.loads(job[0].read_text()), sort_keys=True))
    annotate(path, tmp_path / "notes.json", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(path.read_text())
    with pytest.raises(TraceError, match="cannot read"):
        annotate(tmp_path / "none.json", tmp_path / "notes.json", tmp_path / "out.json")


def test_names_that_json_and_perfetto_have_to_quote(job, tmp_path):
    def names(trace):
        trace[KEY]["groups"][0] |= {"name": "a%22b%5C%E2%82%AC%0A", "description": ""}
        trace[KEY]["host"] = "%22host%22"

    paths = [changed(p, tmp_path / p.name, names) for p in job]
    merge(paths, tmp_path / "m.json")
    made = operations(load(tmp_path / "m.json"))
    assert {e["args"]["comm"] for e in made} == {'a"b\\\u20ac\\n', "group1"}
    merge(paths, tmp_path / "m.pftrace")
    assert 'rank 0 ("host")' in decode(tmp_path / "m.pftrace").processes


def test_events_before_the_first_operation_have_no_negative_time(job, tmp_path):
    done = merge(job, tmp_path / "m.json")
    trace = load(tmp_path / "m.json")
    assert min(e["ts"] for e in trace["traceEvents"] if "ts" in e) >= 0
    assert done.events == 1600


def test_slices_that_do_not_nest(job, tmp_path):
    """Slices that do not nest, as torch's with Python functions: each keeps its own begin and end."""
    thread = {"ph": "X", "cat": "user_annotation", "pid": 5, "tid": 5}
    spans = {"step": (5, 1000), "call": (0, 10), "inner": (6, 3), "next": (20, 2000), "late": (900, 50)}

    def overlap(trace):
        made = [thread | {"name": name, "ts": ts, "dur": dur} for name, (ts, dur) in spans.items()]
        trace["traceEvents"] += sorted(made, key=lambda e: e["ts"])
        trace["traceEvents"].append(thread | {"cat": "python_function", "name": "main", "ts": 1, "dur": 3000})

    path = changed(job[0], tmp_path / "a.json", overlap)
    merge([path], tmp_path / "m.pftrace")
    found = {
        name: (begin, end - begin, track)
        for _, track, name, begin, end, _ in decode(tmp_path / "m.pftrace").slices
        if name in (*spans, "main")
    }
    assert found.pop("main")[2] == "5 5: Python functions"
    first = found["call"][0]
    assert {name: ((at - first) / 1000, length / 1000) for name, (at, length, _) in found.items()} == spans
    assert found["call"][2] == found["inner"][2] == "5 5"
    assert found["step"][2] == "5 5 (at the same time, 1)"


def test_events_without_a_length(job, tmp_path):
    """A slice of length 0 keeps its `dur`; without it viewers show a slice that never ends."""

    def shorten(trace):
        for e in trace["traceEvents"][:9]:
            e["dur"] = 0
        trace["traceEvents"].append({"ph": "i", "name": "now", "ts": 1e7, "pid": 1, "tid": 1, "s": "g"})
        trace["traceEvents"].append({"ph": "X", "name": "never", "ts": 1e7, "pid": 1, "tid": 1})

    path = changed(job[0], tmp_path / "a.json", shorten)
    merge([path], tmp_path / "m.json")
    events = json.loads((tmp_path / "m.json").read_text())["traceEvents"]
    assert sum(e.get("dur") == 0 for e in events) == 9
    assert [("dur" in e, e.get("s")) for e in events if e["name"] in ("now", "never")] == [
        (False, "g"),
        (False, None),
    ]
    merge([path], tmp_path / "m.pftrace")
    lengths = [end - begin for *_, name, begin, end, _ in decode(tmp_path / "m.pftrace").slices]
    assert lengths.count(0) == 10


def test_flows_with_names_and_flows_at_the_edge_of_a_piece(job, tmp_path, monkeypatch):
    """The flows of each rank stay apart, and stay with their slices wherever a piece ends."""

    def flows(trace):
        out = []
        for at, e in enumerate(trace["traceEvents"]):
            out.append(e)
            if at % 2 == 0 and e["name"].startswith("aten"):
                where = {k: e[k] for k in ("pid", "tid", "ts")} | {"cat": "fwdbwd", "name": "fwdbwd"}
                out.append(where | {"ph": "s", "id": at})
                out.append(where | {"ph": "s", "id": f"0x{at}"})
        trace["traceEvents"] = out

    paths = [changed(p, tmp_path / p.name, flows) for p in job]
    monkeypatch.setattr(chrome, "_BLOCK", 997)
    merge(paths, tmp_path / "m.json")
    merge(paths, tmp_path / "m.pftrace")
    ids = [e["id"] for e in load(tmp_path / "m.json")["traceEvents"] if e.get("cat") == "fwdbwd"]
    assert len(set(ids)) == len(ids)
    numbered = sum(isinstance(i, int) for i in ids)
    assert numbered == len(ids) - numbered == 4 * 160
    found = decode(tmp_path / "m.pftrace").flows
    assert len(found) == 80 + numbered
