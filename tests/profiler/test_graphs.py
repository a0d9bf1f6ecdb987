"""Annotations of CUDA graphs, with generated traces: nothing here has run on a GPU."""

import contextlib
import gzip
import json

import pytest
import torch
from typer.testing import CliRunner

from unicomm import InvalidArgumentError, ReduceOp, new_comm
from unicomm.launch.cli import app
from unicomm.profiler import TraceError, annotate
from unicomm.profiler.annotations import GraphAnnotations


class Capture:
    """Plays torch's part: numbers the kernels of a scope, as cudaGraphNodeGetToolsId does."""

    def __init__(self):
        self.active = False
        self.kernels = {}
        self.next = (7 << 32) + 1

    @contextlib.contextmanager
    def mark(self, annotation):
        for _ in range(2):  # kernels of one operation
            self.kernels[self.next] = [annotation, {"str": "another scope"}]
            self.next += 1
        yield

    def annotations(self, *comms):
        out = GraphAnnotations(self.mark, lambda: self.active)
        for comm in comms:
            out.register_with_comm(comm)
        return out


@pytest.fixture
def comm():
    comm = new_comm("fake", torch.device("cpu"), rank=1, size=4, name="main")
    yield comm
    comm.finalize()


def replayed(nodes):
    """A trace with two replays of a graph, in the form of torch's profiler."""
    kernel = {"ph": "X", "cat": "kernel", "pid": 0, "tid": 7, "dur": 1.5}
    events = [
        kernel | {"name": f"k{n}", "ts": 10.0 * at, "args": {"graph node id": n, "stream": 7}}
        for at, n in enumerate([*nodes, *nodes])
    ]
    events.append(kernel | {"name": "alone", "ts": 1.0, "args": {"stream": 7}})
    events.append(
        {"ph": "X", "cat": "cpu_op", "name": "aten::x", "ts": 1.0, "dur": 1.0, "args": {"graph node id": 1}}
    )
    return {"schemaVersion": 1, "traceEvents": events, "traceName": "t"}


def test_from_capture_to_replay(comm, tmp_path):
    capture = Capture()
    found = capture.annotations(comm)
    comm.barrier(False)
    capture.active = True
    comm.all_reduce(torch.ones(8), ReduceOp.SUM, False)
    comm.send(torch.ones(3), 2, False)
    with pytest.raises(InvalidArgumentError):
        comm.broadcast(torch.ones(8), 9, False)
    capture.active = False
    comm.barrier(False)
    assert [(r["unicomm"], r["seq_num at capture"], r["bytes"]) for r in found.records] == [
        ("all_reduce", 2, 32),
        ("send", 1, 12),
    ]
    assert found.save(tmp_path / "a.json", capture.kernels) == 4
    found.remove()
    capture.active = True
    comm.barrier(False)
    assert len(found.records) == 2

    nodes = sorted(capture.kernels)
    (tmp_path / "other.json").write_text(json.dumps(replayed([1, 2])))
    told = ["profile", "annotate", str(tmp_path / "other.json"), str(tmp_path / "a.json")]
    done = CliRunner().invoke(app, [*told, "-o", str(tmp_path / "none.json")])
    assert (done.exit_code, "are both of one run?" in done.output) == (0, True)
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps(replayed([*nodes, nodes[-1] + 1])))
    for output in (tmp_path / "out.json", tmp_path / "out.json.gz"):
        done = CliRunner().invoke(
            app, ["profile", "annotate", str(trace), str(tmp_path / "a.json"), "-o", str(output)]
        )
        assert done.exit_code == 0, done.output
        assert "8 kernels annotated" in done.output
        data = output.read_bytes()
        events = json.loads(gzip.decompress(data) if output.suffix == ".gz" else data)["traceEvents"]
        before = json.loads(trace.read_text())["traceEvents"]
        ops = [e["args"].get("unicomm") for e in events]
        assert ops == ["all_reduce", "all_reduce", "send", "send", None] * 2 + [None, None]
        for old, new in zip(before, events, strict=True):
            assert old["args"].items() <= new["args"].items()
            assert {k: v for k, v in old.items() if k != "args"} == {
                k: v for k, v in new.items() if k != "args"
            }
        assert events[0]["args"] == before[0]["args"] | found.records[0]


def test_what_cannot_be_used(comm, tmp_path):
    trace, notes = tmp_path / "t.json", tmp_path / "a.json"
    trace.write_text(json.dumps(replayed([1])))
    for text in ("no", "[]", '{"version": 2, "kernels": {}}', '{"version": 1, "kernels": {"x": []}}'):
        notes.write_text(text)
        with pytest.raises(TraceError, match="holds no annotations"):
            annotate(trace, notes, tmp_path / "o.json")
    notes.write_text('{"version": 1, "kernels": {}}')
    with pytest.raises(TraceError, match="is the trace itself"):
        annotate(trace, notes, trace)
    with pytest.raises(TraceError, match="has to end in"):
        annotate(trace, notes, tmp_path / "o.pftrace")
    trace.write_text("{")
    with pytest.raises(TraceError, match="no Chrome trace"):
        annotate(trace, notes, tmp_path / "o.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "t.json"]
