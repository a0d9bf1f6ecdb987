"""torch's own record of a communication, written by the extension that is built on demand."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from tests.old_torch import OLD_TORCH
from unicomm import ReduceOp, new_comm
from unicomm.extensions import build_torch_extension as bridge
from unicomm.extensions import torch_extensions
from unicomm.launch.cli import app
from unicomm.profiler import events

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache with a fresh build."""
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        done = CliRunner().invoke(app, ["build", "torch-bridge", "--part=record"])
        assert done.exit_code == 0, done.output
        assert torch_extensions.extension_path().exists()
        yield


@pytest.mark.timeout(200)
@pytest.mark.parametrize("shapes", [False, True])
def test_the_record_that_other_tools_read(cache, tmp_path, shapes):
    comm = new_comm("fake", CPU, rank=3, size=8, name="world")
    child = comm.split([1, 3, 5], "odd")
    with torch.profiler.profile(record_shapes=shapes) as prof:
        comm.all_reduce(torch.ones(4, 2), ReduceOp.SUM, False)
        comm.all_gather_single(torch.ones(24), torch.ones(3), True).wait()
        child.barrier(False)
        comm.all_to_all_v_single(torch.ones(16), torch.ones(16), [2] * 8, [2] * 8, False)
        comm.send(torch.ones(3, dtype=torch.bfloat16), 1, False)
    prof.export_chrome_trace(str(tmp_path / "a.json"))
    trace = json.loads((tmp_path / "a.json").read_text())
    records = [e for e in trace["traceEvents"] if e.get("name") == "record_param_comms"]
    args = [e["args"] for e in records]
    ops = ["all_reduce", "all_gather_single", "barrier", "all_to_all_v_single", "send"]
    assert [a["Collective name"] for a in args] == ops
    if not OLD_TORCH:  # it takes the numbers, but writes them nowhere
        assert [a["Seq"] for a in args] == [1, 2, 1, 3, 1]
    assert args[0]["Process Group Name"] == "world"
    assert (args[0]["Group size"], args[0]["Rank"], args[0]["dtype"]) == (8, 3, "Float")
    assert (args[1]["In msg nelems"], args[1]["Out msg nelems"]) == (3, 24)
    assert OLD_TORCH or args[1]["Is asynchronized op"]
    assert (args[2]["Group size"], args[2]["Global rank start"], args[2]["Global rank stride"]) == (3, 1, 2)
    assert args[4]["dtype"] == "BFloat16"
    # Ours are there too, and the torch record lies within each.
    mine = events(prof)
    assert [e.op for e in mine] == [a["Collective name"] for a in args]
    base = trace["baseTimeNanoseconds"]
    for own, record in zip(mine, records, strict=True):
        assert own.start_ns - 1 <= base + record["ts"] * 1000
        assert base + (record["ts"] + record["dur"]) * 1000 <= own.start_ns + own.duration_ns + 1
    if not OLD_TORCH:  # it has this in files only
        told = [e.event_metadata for e in prof.events() if e.name == "record_param_comms"]
        assert [m.seq for m in told] == [1, 2, 1, 3, 1]
    child.finalize()
    comm.finalize()


def test_without_a_build_there_is_no_such_event(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert torch_extensions.load() is None
    torch_extensions.extension_path().parent.mkdir(parents=True)
    torch_extensions.extension_path().write_text("no library")
    assert torch_extensions.load() is None  # said in the log, and the profiler goes on
    comm = new_comm("fake", CPU, rank=0, size=2, name="world")
    with torch.profiler.profile() as prof:
        comm.barrier(False)
    comm.finalize()
    assert [e.op for e in events(prof)] == ["barrier"]
    assert not any(e.name == "record_param_comms" for e in prof.events())


def test_a_build_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(bridge.BuildError, match="no C\\+\\+ compiler"):
        bridge.build()
    monkeypatch.setenv("CXX", "false")
    done = CliRunner().invoke(app, ["build", "torch-bridge"])
    assert done.exit_code == 1
    assert "false failed" in done.output
    assert not torch_extensions.extension_path().exists()
