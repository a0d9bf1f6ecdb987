"""Dumps that the program asks for, and torch's analyzer over them."""

import json
import os
import pickle
import sys
import threading

import pytest
import torch

import unicomm
from tests.flight_recorder.rings import ALL_REDUCE, BROADCAST, META, RECV, SEND
from tests.old_torch import not_with_old_torch
from tests.processes.forked_interpreters import run
from unicomm import _core, flight_recorder
from unicomm.flight_recorder.formats import torch_dump as formats
from unicomm.flight_recorder.formats.pickles import read
from unicomm.flight_recorder.recording import dumps
from unicomm.flight_recorder.ring.reader import read_ring
from unicomm.testing import run_ranks


@pytest.fixture
def recorded(fresh_recorder):
    """This process has recorded operations of two ranks, which are threads."""

    def program(comm):
        comm.all_reduce(torch.ones(4), unicomm.ReduceOp.SUM, False)
        comm.barrier(False)

    run_ranks(program, 2, name="dumped")


def test_formats(recorded, tmp_path):
    path = flight_recorder.dump(tmp_path / "deep" / "a")
    assert path == tmp_path / "deep" / "a"
    assert pickle.loads(path.read_bytes())["version"] == "2.10"
    assert len(read(path)) >= 4
    trace = json.loads(flight_recorder.dump(tmp_path / "b", format="json").read_text())
    assert trace["entries"][-1]["profiling_name"] == "gloo:barrier"
    ring = read_ring(flight_recorder.dump(tmp_path / "c", format="ring"))
    assert ring.pid == os.getpid()
    assert ring.op(ring.records[-1]) == "barrier"
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="format='xml' is unknown; use one of pickle, json, ring"):
        flight_recorder.dump(tmp_path / "d", format="xml")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        flight_recorder.dump(tmp_path / "file" / "e")


def test_before_the_first_communicator(tmp_path):
    code = f"from unicomm import flight_recorder; flight_recorder.dump({str(tmp_path / 'a')!r})"
    done = run([sys.executable, "-c", code])
    assert "create a communicator before" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_are_threads_get_a_file_each(recorded, tmp_path):
    paths = flight_recorder.dump_folder(tmp_path)
    assert {"rank_0", "rank_1"} <= {path.name for path in paths}
    for rank in (0, 1):
        trace = pickle.loads((tmp_path / f"rank_{rank}").read_bytes())
        assert trace["pg_config"]["dumped"]["ranks"] == "[0, 1]"
        ours = [e for e in trace["entries"] if e["process_group"][0] == "dumped"]
        assert [e["profiling_name"] for e in ours[-2:]] == ["gloo:all_reduce", "gloo:barrier"]
    assert [p.name for p in flight_recorder.dump_folder(tmp_path, "ring")] == ["rank_0.ucring"]


def test_a_reader_never_sees_half_a_dump(recorded, tmp_path):
    """Eight threads write the same names over and over while others read them."""
    stop, seen, errors = threading.Event(), [], []
    flight_recorder.dump_folder(tmp_path)

    def write():
        try:
            for _ in range(10):
                flight_recorder.dump_folder(tmp_path)
        except Exception as error:
            errors.append(error)

    def look():
        while not stop.is_set():
            try:
                seen.append(len(read(tmp_path / "rank_0")))
            except Exception as error:
                errors.append(error)
                return

    readers = [threading.Thread(target=look) for _ in range(2)]
    writers = [threading.Thread(target=write) for _ in range(8)]
    for thread in [*readers, *writers]:
        thread.start()
    for thread in writers:
        thread.join(60)
    stop.set()
    for thread in readers:
        thread.join(60)
    assert errors == []
    assert min(seen) >= 2
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".part")]


def test_who_asks_while_a_dump_is_written_gets_one_that_began_later(monkeypatch, tmp_path):
    begun, go_on, calls = threading.Event(), threading.Event(), []

    def slow(folder, form):
        calls.append(folder)
        begun.set()
        assert go_on.wait(30)

    monkeypatch.setattr(dumps, "dump_folder", slow)
    triggers = dumps._Triggers(dumps._Settings(tmp_path, "pickle", 0))
    threads = [threading.Thread(target=triggers.write) for _ in range(5)]
    threads[0].start()
    assert begun.wait(30)
    for thread in threads[1:]:
        thread.start()
    while triggers._asked < 5:
        os.sched_yield()
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(calls) == 2


def test_a_dump_that_fails_is_a_warning(recorded, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    dumps._Triggers(dumps._Settings(tmp_path / "file" / "x", "pickle", 0)).write()
    assert "no dump in UNICOMM_TRACE_DUMP" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"UNICOMM_TRACE_DUMP": "/x", "UNICOMM_TRACE_DUMP_FORMAT": "xml"}, "pickle, json, ring"),
        ({"UNICOMM_TRACE_DUMP": "/x", "UNICOMM_TRACE_DUMP_SIGNAL": "SIGKILL"}, "can be caught"),
        ({"UNICOMM_TRACE_DUMP": "/x", "UNICOMM_TRACE_DUMP_SIGNAL": "twelve"}, "can be caught"),
        ({"UNICOMM_TRACE_DUMP_SIGNAL": "1"}, "set UNICOMM_TRACE_DUMP"),
    ],
)
def test_bad_settings(monkeypatch, settings, message):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dumps, "_triggers", None)
    with pytest.raises(ValueError, match=message):
        unicomm.new_comm("shm", torch.device("cpu"), name="refused")


def test_a_signal_that_the_program_handles_is_left_to_it():
    code = """
import signal, torch, unicomm
signal.signal(signal.SIGUSR2, print)
try:
    unicomm.new_comm("shm", torch.device("cpu"), name="x")
except ValueError as error:
    print(error)
assert signal.getsignal(signal.SIGUSR2) is print
"""
    env = os.environ | {"UNICOMM_TRACE_DUMP": "/nowhere", "UNICOMM_TRACE_DUMP_SIGNAL": "1"}
    done = run([sys.executable, "-c", code], env=env, check=True)
    assert "has a handler of the program's own; name another one" in done.stdout


def write_group(folder, world, pairs):
    """Dumps of a group with collectives, and of a group for each pair with one message."""
    tensor = [torch.ones(3)]
    for rank in range(world):
        recorder = _core.Recorder("", META, rank, world, 64)
        main = recorder.add_comm("main", "shm", "m", f"0-{world - 1}", rank, world)
        for seq, op in enumerate((ALL_REDUCE, BROADCAST, ALL_REDUCE), 1):
            recorder.finish(recorder.begin(main, op, seq, seq, tensor, tensor, op == ALL_REDUCE, op != 3))
        for a, b in pairs:
            if rank not in (a, b):
                continue
            comm = recorder.add_comm(f"pair{a}{b}", "shm", f"p{a}{b}", f"{a},{b}", int(rank == b), 2)
            if rank == a:
                message = recorder.begin(comm, SEND, 1, 9, tensor, [], peer=1, flags=2)
            else:
                message = recorder.begin(comm, RECV, 1, 9, [], tensor, peer=0, flags=2 | 8)
            recorder.finish(message)
            recorder.finish(recorder.begin(comm, ALL_REDUCE, 1, 10, tensor, tensor, 1))
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(formats.to_dict(read_ring(recorder.snapshot()))))


def torchs_analyzer(folder):
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "-p", "rank_"]
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return (done.stdout + done.stderr).lower()


@not_with_old_torch("has an analyzer that takes nccl and xccl only")
def test_torchs_analyzer_accepts_a_group_of_four(tmp_path):
    """Its messages go through groups of two: in larger ones torch's analyzer expects all members."""
    write_group(tmp_path, 4, [(0, 1), (2, 3), (1, 2)])
    said = torchs_analyzer(tmp_path)
    assert "mismatch" not in said
    assert "not all ranks" not in said


@not_with_old_torch("has an analyzer that takes nccl and xccl only")
def test_torchs_analyzer_would_complain(tmp_path):
    """The same with one rank that called something else."""
    write_group(tmp_path, 4, [])
    trace = pickle.loads((tmp_path / "rank_3").read_bytes())
    trace["entries"][1]["profiling_name"] = "gloo:reduce"
    (tmp_path / "rank_3").write_bytes(pickle.dumps(trace))
    assert "mismatch" in torchs_analyzer(tmp_path)
