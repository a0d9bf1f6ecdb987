"""Dumps in torch's format, the hook over the ring, and the tables."""

import json
import os
import pickle
import sys

import pytest
import torch

import unicomm
from tests.commands import run
from tests.flight_recorder.rings import RECV, SEND, write_ring
from tests.old_torch import not_with_old_torch
from unicomm.flight_recorder.corpus.simulated_job import Action, SimulatedJob
from unicomm.flight_recorder.formats import torch_dump as formats
from unicomm.flight_recorder.reports import rings_text as show
from unicomm.flight_recorder.ring.reader import Ring, read_folder, read_ring
from unicomm.hooks import FlightRecorderHook
from unicomm.testing import run_ranks

REQUIRED = [
    "record_id",
    "process_group",
    "collective_seq_id",
    "p2p_seq_id",
    "profiling_name",
    "input_sizes",
    "input_dtypes",
    "output_sizes",
    "output_dtypes",
    "state",
    "time_created_ns",
    "is_p2p",
    "frames",
]


def dump(path):
    return formats.to_dict(read_ring(path))


def test_entries(tmp_path):
    write_ring(tmp_path / "a.ucring", 0, 2, 3, unfinished=True)
    trace = dump(tmp_path / "a.ucring")
    assert trace["version"] == "2.10"
    group = {"name": "main", "desc": "shm", "ranks": "[0, 1]", "unicomm_uid": "u1"}
    assert trace["pg_config"] == {"main": group}
    assert trace["pg_status"]["0"]["last_completed_collective"] == 2
    assert [e["state"] for e in trace["entries"]] == ["completed", "completed", "started"]
    entry = trace["entries"][0]
    assert set(REQUIRED) <= set(entry)
    assert entry["profiling_name"] == "gloo:all_reduce"
    assert entry["unicomm_backend"] == "shm"
    assert entry["input_sizes"] == [[2, 3]]
    assert entry["input_dtypes"] == ["Float"]
    assert entry["duration_ms"] >= 0
    assert abs(entry["time_created_ns"] / 1e9 - os.stat(tmp_path / "a.ucring").st_mtime) < 100
    assert len(formats.to_dict(read_ring(tmp_path / "a.ucring"), include_completed=False)["entries"]) == 1


def test_several_tensors_keep_their_number(tmp_path):
    recorder = write_ring(tmp_path / "a.ucring", 0, 3, 0)
    recorder.begin(0, 6, 1, 0, [torch.zeros(4)], [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4)])
    [entry] = dump(tmp_path / "a.ucring")["entries"]
    assert entry["output_sizes"] == [[4], [4], [4]]
    assert entry["output_dtypes"] == ["Float"] * 3


@not_with_old_torch("has an analyzer that takes nccl and xccl only")
def test_torchs_own_analyzer_reads_our_dumps(tmp_path):
    """Two ranks with collectives and a matched send and receive whose numbers coincide."""
    rings, dumps = tmp_path / "rings", tmp_path / "dumps"
    rings.mkdir()
    dumps.mkdir()
    for rank in (0, 1):
        recorder = write_ring(rings / f"{rank}.ucring", rank, 2, 5)
        tensor = [torch.ones(3)]
        if rank == 0:
            message = recorder.begin(0, SEND, 1, 9, tensor, [], peer=1, flags=2)
        else:
            message = recorder.begin(0, RECV, 1, 9, [], tensor, peer=0, flags=2 | 8)
        recorder.finish(message)
        (dumps / f"rank_{rank}").write_bytes(
            pickle.dumps(formats.to_dict(read_ring(rings / f"{rank}.ucring")))
        )
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(dumps), "-p", "rank_"]
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    said = (done.stdout + done.stderr).lower()
    assert "mismatch" not in said
    assert "not all ranks" not in said


def test_hook_over_the_ring(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHCOMM_FR_DUMP_TEMP_FILE", str(tmp_path / "deep" / "dump_"))
    hook, isolated = FlightRecorderHook(max_entries=3), FlightRecorderHook(isolated=True)
    assert hook.is_enabled()

    def program(comm):
        if comm.get_rank() == 0:
            hook.register_with_comm(comm)
            isolated.register_with_comm(comm)
        for _ in range(5):
            comm.barrier(False)
        comm.broadcast(torch.ones(2), 1, False)

    run_ranks(program, 2, name="hooked")
    trace = json.loads(hook.dump_json())
    assert list(trace["pg_config"]) == ["hooked"]
    assert [e["profiling_name"] for e in trace["entries"]] == [
        "gloo:barrier",
        "gloo:barrier",
        "gloo:broadcast",
    ]
    assert hook.size() == 3
    assert isolated.size() == 6
    assert json.loads(isolated.dump_json(include_completed=False))["entries"] == []
    path = hook.dump_file(0)
    assert path == tmp_path / "deep" / "dump_0"
    assert pickle.loads(path.read_bytes())["entries"] == trace_entries(hook)
    assert [p.name for p in path.parent.iterdir()] == ["dump_0"]
    isolated.reset()
    assert isolated.size() == 0
    with pytest.raises(ValueError, match="max_entries"):
        FlightRecorderHook(max_entries=0)


def trace_entries(hook):
    return [
        {**e, "process_group": tuple(e["process_group"])} for e in json.loads(hook.dump_json())["entries"]
    ]


def text_of(renderable, width=200):
    from rich.console import Console

    console = Console(width=width, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def test_table_shows_who_is_absent(tmp_path):
    keep = [
        write_ring(tmp_path / f"{r}.ucring", r, 3, 2 if r == 1 else 3, unfinished=r != 1) for r in range(3)
    ]
    rings, findings = read_folder(tmp_path)
    text = text_of(show.render(rings, findings))
    last = next(line for line in text.splitlines() if line.strip().startswith("3"))
    assert last.count("started for") == 2
    assert last.count("absent") == 1
    assert "rings.py:" in last
    assert "float32[2x3] SUM" in last
    assert "running" in text
    assert len(keep) == 3


def test_table_of_many_ranks_groups_them(tmp_path):
    keep = [write_ring(tmp_path / f"{r}.ucring", r, 12, 1, unfinished=r == 7) for r in range(12)]
    text = text_of(show.render(read_folder(tmp_path)[0]))
    assert "0-6,8-11 completed" in text
    assert "7 started" in text
    assert len(keep) == 12


def test_table_tells_ranks_apart_that_called_different_things(tmp_path):
    for rank in (0, 1):
        recorder = write_ring(tmp_path / f"{rank}.ucring", rank, 2, 1)
        recorder.begin(
            0, 4 if rank else 3, 2, 0, [torch.ones(5)], [torch.ones(5)], 1 if rank else 0, -1 if rank else 0
        )
    text = text_of(show.render(read_folder(tmp_path)[0]))
    assert "0: broadcast" in text
    assert "1: all_reduce" in text


def test_overwritten_messages_are_not_called_absent():
    job = SimulatedJob(4, [[] for _ in range(4)], capacity=4)
    job.programs[0] = [Action("send", peer=peer) for peer in (1, 3, 2, 2, 2, 2, 3)]
    job.programs[1] = [Action("recv", peer=0)]
    job.programs[2] = [Action("recv", peer=0) for _ in range(5)]
    job.programs[3] = [Action("recv", peer=0) for _ in range(3)]
    rings = [Ring(job.run().ring(rank)) for rank in range(4)]
    text = text_of(show.render(rings))
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if "→" in line]
    cells = {row[0]: row[3] for row in rows}  # of rank 0
    assert len(cells) == 1 + 4 + 3
    assert cells["0→1 1"] == "overwritten or absent"  # its ring has no message of this pair
    assert cells["0→3 1"] == "overwritten"
    assert cells["0→2 5"] == cells["0→3 3"] == "not recorded"
    assert all(cells[number].startswith("✓") for number in ("0→2 2", "0→2 3", "0→2 4", "0→3 2"))


def test_raw_and_json(tmp_path):
    recorder = write_ring(tmp_path / "0.ucring", 0, 1, 4)
    rings, findings = read_folder(tmp_path)
    assert text_of(show.render_raw(rings, show.Selection(last=3))).count("all_reduce") == 3
    data = json.loads(json.dumps(show.as_data(rings, findings)))
    assert len(data["processes"][0]["trace"]["entries"]) == 4
    del recorder


def command(*args, **env):
    return run([sys.executable, "-m", "unicomm", *args], env=os.environ | env | {"COLUMNS": "200"})


def test_command(tmp_path):
    recorder = write_ring(tmp_path / "0.ucring", 0, 2, 4, unfinished=True)
    (tmp_path / "broken.ucring").write_bytes(b"zz")
    shown = command("trace", "show", str(tmp_path), "--last", "2")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("all_reduce") == 2
    assert "broken.ucring" in shown.stdout
    only = json.loads(command("trace", "show", str(tmp_path), "--json").stdout)
    assert only["processes"][0]["operations"] == 4
    empty = tmp_path / "empty"
    nothing = command("trace", "show", UNICOMM_TRACE_DIR=str(empty))
    assert nothing.returncode == 2
    assert str(empty) in nothing.stderr
    assert "UNICOMM_TRACE_KEEP=always" in nothing.stderr
    assert "show" in command("trace", "--help").stdout
    del recorder


def test_every_operation_of_every_backend_is_recorded():
    from unicomm.flight_recorder.recording import writer
    from unicomm.testing import conformance

    for backend in ("shm", "gloo", "fake"):
        for operation in conformance.OPERATIONS:
            before = read_ring(writer.ring_bytes()).total if writer.ring_bytes() else 0
            run_ranks(
                lambda comm, op=operation: conformance.check(
                    comm, op, lambda c: c.count == 24 and c.layout == "flat"
                ),
                2,
                backend=backend,
            )
            ring = read_ring(writer.ring_bytes())
            names = {ring.op(r) for r in ring.records[ring.records["id"] > before]}
            assert names <= {operation, "send", "recv"}, (backend, operation, names)
            assert names, (backend, operation)
    assert isinstance(unicomm.__version__, str)
