"""Merging the traces of all ranks."""

import builtins
import gzip
import json
import random
import sys

import pytest
import torch
from typer.testing import CliRunner

import unicomm.profiler
from benchmarks import profile_merge as generator
from tests.profiler.traces import decode, load, operations, processes
from unicomm import ReduceOp, new_comm
from unicomm.flight_recorder import formats
from unicomm.launch.cli import app
from unicomm.profiler import TraceError, chrome, merge, read_events, report
from unicomm.profiler.alignment import align
from unicomm.profiler.operation_columns import join, load_traces

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Traces of 4 ranks x 400 events, 80 of them collectives; rank 2 is 3 ms late once."""
    return generator.generate(tmp_path_factory.mktemp("job"), 4, 400, 0.2, late=2)


def test_clocks_are_aligned(job):
    files, found = load_traces(job)
    assert [f.rank for f in files] == [0, 1, 2, 3]
    apart = {
        r: random.Random(r).randrange(-5_000_000, 5_000_000) for r in range(4)
    }  # as the generator has it
    offsets = align(found).offsets
    for a in range(4):
        for b in range(4):
            assert (
                abs((offsets[a] - offsets[b]) - (apart[a] - apart[b])) < 3000
            )  # completions scatter by 2 us
    joined = join(found, offsets)
    worst = int(joined.late.argmax())
    assert int(found.rank[worst]) == 2
    assert joined.late[worst] == pytest.approx(3_000_000, rel=0.01)
    waited = joined.waiting[found.cell == found.cell[worst]]
    assert sorted(waited)[0] == 0
    assert all(w == pytest.approx(3_000_000, rel=0.01) for w in sorted(waited)[1:])


@pytest.mark.parametrize("ending", ["json", "json.gz"])
def test_one_trace_of_all(job, tmp_path, ending):
    output = tmp_path / f"merged.{ending}"
    told = []
    done = merge(job, output, lambda at, total: told.append((at, total)))
    assert (done.ranks, done.operations, done.flows) == ([0, 1, 2, 3], 320, 80)
    assert told[-1][0] == told[-1][1] == sum(p.stat().st_size for p in job)
    assert list(tmp_path.iterdir()) == [output]
    trace = load(output)
    names = processes(trace)
    assert names == {r + 1: f"rank {r} (host0)" for r in range(4)}
    assert done.events == 4 * 400
    made = operations(trace)
    assert len(made) == 320
    # Each collective: one slice on each rank, all with the same flow, which begins at the first arrival.
    flows = {}
    for e in trace["traceEvents"]:
        if e["ph"] in ("s", "t", "f"):
            flows.setdefault(e["id"], []).append(e)
    assert len(flows) == 80
    at = {(e["pid"], e["tid"], e["ts"]): e for e in made}
    for steps in flows.values():
        assert [s["ph"] for s in sorted(steps, key=lambda s: (s["ts"], "stf".index(s["ph"])))] == [
            "s",
            "t",
            "t",
            "f",
        ]
        slices = [at[s["pid"], s["tid"], s["ts"]] for s in steps]
        assert {s["pid"] for s in slices} == {1, 2, 3, 4}
        assert len({(s["args"]["comm_uid"], s["args"]["seq_num"]) for s in slices}) == 1
        ends = [s["ts"] + s["dur"] for s in slices]
        assert max(ends) - min(ends) < 5  # us: they leave together
        last = max(s["ts"] for s in slices)
        for s in slices:
            assert s["args"]["waiting_us"] == pytest.approx(last - s["ts"], abs=0.002)
            assert s["args"]["waiting_us"] + s["args"]["transfer_us"] == pytest.approx(s["dur"], abs=0.002)
    late = max(made, key=lambda s: s["args"]["waiting_us"])
    assert late["args"]["waiting_us"] == pytest.approx(3000, rel=0.01)
    inside = [e for e in trace["traceEvents"] if e["name"] == "waiting" and e["ts"] == late["ts"]]
    assert any(e["dur"] == pytest.approx(late["args"]["waiting_us"]) for e in inside)
    # The ranks' own events are all there, and tell the number although they were recorded without arguments.
    own = [e for e in trace["traceEvents"] if e.get("cat") == "cpu_op"]
    assert len(own) == 1600
    assert all("seq_num" in e["args"] for e in own if e["name"].startswith("unicomm::"))


def test_an_asynchronous_operation_leads_from_issue_to_run(tmp_path):
    comm = new_comm("fake", CPU, rank=1, size=4, name="main")
    with torch.profiler.profile() as prof:
        comm.all_reduce(torch.ones(4), ReduceOp.SUM, True).wait()
        comm.barrier(False)
    comm.finalize()
    prof.export_chrome_trace(str(tmp_path / "rank1.json"))
    done = merge([tmp_path / "rank1.json"], tmp_path / "m.json")
    assert done.flows == 0  # nobody else's trace
    trace = load(tmp_path / "m.json")
    steps = [e for e in trace["traceEvents"] if e.get("cat") == "issue"]
    assert [e["ph"] for e in steps] == ["s", "f"]
    (issue,) = [
        e for e in trace["traceEvents"] if e["name"] == "unicomm::all_reduce" and e["cat"] == "cpu_op"
    ]
    (run,) = operations(trace)
    assert (steps[0]["tid"], steps[0]["ts"]) == (issue["tid"], issue["ts"])
    assert (steps[1]["tid"], steps[1]["ts"]) == (run["tid"], run["ts"])
    assert issue["args"]["seq_num"] == run["args"]["seq_num"] == 1
    assert set(processes(trace)) == {2}


def test_perfetto(job, tmp_path):
    pytest.importorskip("perfetto")
    merge(job, tmp_path / "m.pftrace")
    flows = decode(tmp_path / "m.pftrace").flows
    assert len(flows) == 80
    for steps in flows.values():
        assert sorted(p for p, _, _ in steps) == [f"rank {r} (host0)" for r in range(4)]
        assert [ends for _, _, ends in steps] == [0, 0, 0, 1]
        assert {name for _, name, _ in steps} == {"unicomm::all_reduce"}


def test_ranks_are_those_of_the_job(tmp_path):
    """Root and peer in a sub-group are ranks of the job, although its events have ranks of the group."""
    comm = new_comm("fake", CPU, rank=3, size=8, name="main")
    child = comm.split([1, 3, 5], "odd")
    with torch.profiler.profile() as prof:
        child.broadcast(torch.ones(3), 0, False)
        child.send(torch.ones(3), 2, False)
    child.finalize()
    comm.finalize()
    prof.export_chrome_trace(str(tmp_path / "rank3.json"))
    merge([tmp_path / "rank3.json"], tmp_path / "m.json")
    trace = load(tmp_path / "m.json")
    (root,) = operations(trace, "unicomm::broadcast")
    (sent,) = operations(trace, "unicomm::send")
    assert (root["args"]["root"], sent["args"]["peer"]) == (1, 5)


@pytest.mark.parametrize("shapes", [False, True])
def test_both_forms_say_the_same(tmp_path, shapes):
    """Compares all slices and arguments of a real trace with operations of each kind."""
    comm = new_comm("fake", CPU, rank=1, size=4, name="main")
    with torch.profiler.profile(record_shapes=shapes) as prof:
        x = torch.ones(64, requires_grad=True)
        (x * 2).sum().backward()
        comm.all_reduce(torch.ones(4), ReduceOp.SUM, True).wait()
        comm.broadcast(torch.ones(300), 3, False)
        comm.send(torch.ones(3), 2, False)
        comm.barrier(False)
    comm.finalize()
    prof.export_chrome_trace(str(tmp_path / "rank1.json"))
    merge([tmp_path / "rank1.json"], tmp_path / "m.json")
    merge([tmp_path / "rank1.json"], tmp_path / "m.pftrace")
    trace = load(tmp_path / "m.json")
    base = trace["baseTimeNanoseconds"]
    internal = ("Record function id", "Ev Idx")

    def plain(value):  # what Perfetto has no type for is JSON there
        return value if isinstance(value, int | float | str) else json.dumps(value, separators=(",", ":"))

    json_slices = sorted(
        (e["name"], base + round(e["ts"] * 1000), base + round(e["ts"] * 1000) + round(e["dur"] * 1000), args)
        for e in trace["traceEvents"]
        if e["ph"] == "X"
        for args in [sorted((k, plain(v)) for k, v in e.get("args", {}).items() if k not in internal)]
    )
    decoded = decode(tmp_path / "m.pftrace")
    slices = sorted((name, b, e, sorted(args.items())) for _, _, name, b, e, args in decoded.slices)
    assert len(slices) > 20
    for one, other in zip(slices, json_slices, strict=True):
        assert (one[0], one[3]) == (other[0], other[3])
        assert abs(one[1] - other[1]) <= 1
        assert abs(one[2] - other[2]) <= 2
    # An arrow from the asynchronous issue, and those from forward to backward.
    flows = {e["id"] for e in trace["traceEvents"] if e["ph"] in ("s", "f")}
    assert len(decoded.flows) == len(flows) >= 2
    assert all(len(steps) == 2 for steps in decoded.flows.values())


def test_perfetto_without_the_package(job, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("perfetto"):
            raise ModuleNotFoundError("No module named 'perfetto'", name="perfetto")
        return real(name, *args, **kwargs)

    for package, name in ((unicomm.profiler, "merged_perfetto"), (formats, "perfetto_packets")):
        monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)
        monkeypatch.delattr(package, name, raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'unicomm\[trace\]'"):
        merge(job, tmp_path / "m.pftrace")
    assert list(tmp_path.iterdir()) == []


def test_pieces_of_any_size_give_the_same(job, monkeypatch, tmp_path):
    whole = json.loads(job[0].read_text())["traceEvents"]
    packed = tmp_path / "a.json.gz"
    packed.write_bytes(gzip.compress(job[0].read_bytes()))
    for block in (700, 4096, 1 << 20):
        monkeypatch.setattr(chrome, "_BLOCK", block)
        for path in (job[0], packed):
            with chrome.Reader(path) as reader:
                assert [e for piece in reader.pieces() for e in piece] == whole
                assert reader.tail == {"traceName": "t"}
                assert reader.head["schemaVersion"] == 1


def test_odd_but_right_traces(tmp_path, monkeypatch):
    """Texts that look like the end of an event, nested lists, an inner 'traceEvents', a bare list."""
    events = [
        {
            "ph": "X",
            "name": '"}, {"x": [',
            "ts": 1.5,
            "pid": 1,
            "tid": 1,
            "args": {"a": [{"b": 1}, {"c": 2}]},
        },
        {"ph": "i", "name": "\\", "ts": 2, "pid": "Spans", "tid": "", "args": {"traceEvents": [{}, {}]}},
    ] * 40
    monkeypatch.setattr(chrome, "_BLOCK", 97)
    path = tmp_path / "a.json"
    for indent in (None, 2):
        path.write_text(
            json.dumps({"inner": {"traceEvents": []}, "traceEvents": events, "z": 1}, indent=indent)
        )
        with chrome.Reader(path) as reader:
            assert [e for piece in reader.pieces() for e in piece] == events
            assert (reader.head, reader.tail) == ({"inner": {"traceEvents": []}}, {"z": 1})
        for text in (json.dumps(events, indent=indent), json.dumps(events, indent=indent).rstrip("]") + ","):
            path.write_text(text)
            with chrome.Reader(path) as reader:
                assert [e for piece in reader.pieces() for e in piece] == events


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"no",
        b'{"traceEvents": 5}',
        b'{"traceEvents": [{"a": 1}',
        b"\x1f\x8bxx",
        b'{"traceEvents": [{]}',
    ],
)
def test_what_is_no_trace_is_said(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_bytes(text)
    with pytest.raises(TraceError, match=r"a\.json is no Chrome trace"):
        merge([path], tmp_path / "m.json")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["unicomm::all_reduce", "aten::op_1"])
@pytest.mark.parametrize("damage", [{"ts": "soon"}, {"ts": None, "dur": None}, {"args": 5, "ts": []}])
def test_damaged_events_are_said(job, tmp_path, name, damage):
    trace = json.loads(job[0].read_text())
    event = next(e for e in trace["traceEvents"] if e["name"] == name)
    event |= damage
    path = tmp_path / "a.json"
    path.write_text(json.dumps(trace))
    readers = [lambda: merge([path], tmp_path / "m.json")] if damage["ts"] is not None else []
    readers.append((lambda: read_events(path)) if name.startswith("unicomm") else (lambda: report([path])))
    for read in readers:
        with pytest.raises(TraceError, match=r"a\.json is no Chrome trace: an event of it is damaged"):
            read()
    assert list(tmp_path.glob("*.part*")) == []


def test_inputs_that_do_not_fit(job, tmp_path):
    with pytest.raises(TraceError, match="both of rank 1"):
        merge([job[0], job[1], job[1]], tmp_path / "m.json")
    with pytest.raises(TraceError, match="has to end in"):
        merge(job, tmp_path / "m.txt")
    with pytest.raises(TraceError, match="is one of the traces"):
        merge(job, job[0])
    with pytest.raises(TraceError, match="does not exist"):
        merge(job, tmp_path / "no" / "m.json")
    with pytest.raises(TraceError, match="cannot read"):
        merge([tmp_path / "none.json"], tmp_path / "m.json")
    trace = json.loads(job[1].read_text())
    trace["unicomm"]["groups"][0]["ranks"] = "0-7"
    (tmp_path / "other.json").write_text(json.dumps(trace))
    with pytest.raises(TraceError, match="disagree on the members"):
        merge([job[0], tmp_path / "other.json"], tmp_path / "m.json")
    trace["unicomm"]["rows"][3].pop()
    (tmp_path / "other.json").write_text(json.dumps(trace))
    with pytest.raises(TraceError, match="damaged"):
        merge([tmp_path / "other.json"], tmp_path / "m.json")
    trace["unicomm"]["version"] = 9
    (tmp_path / "other.json").write_text(json.dumps(trace))
    with pytest.raises(TraceError, match="version 9"):
        merge([tmp_path / "other.json"], tmp_path / "m.json")
    del trace["unicomm"]
    (tmp_path / "other.json").write_text(json.dumps(trace))
    with pytest.raises(TraceError, match="holds no table"):
        merge([tmp_path / "other.json"], tmp_path / "m.json")


def test_sorted_keys(job, tmp_path):
    """A tool that sorts the keys puts the table after the events."""
    paths = []
    for path in job:
        paths.append(tmp_path / path.name)
        paths[-1].write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    assert merge(paths, tmp_path / "m.json").flows == 80


def test_the_command(job, tmp_path):
    output = tmp_path / "m.json.gz"
    done = CliRunner().invoke(app, ["profile", "merge", *map(str, job), "-o", str(output)])
    assert done.exit_code == 0, done.output
    assert "4 ranks, 1600 events, 320 operations, 80 flows" in done.output
    assert len(operations(load(output))) == 320
    done = CliRunner().invoke(app, ["profile", "merge", str(job[0]), "-o", str(tmp_path / "m.xml")])
    assert done.exit_code == 2
    assert "has to end in" in done.output
