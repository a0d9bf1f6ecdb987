"""Reading: formats, folders, archives, names, and input that is broken."""

import gzip
import io
import json
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.corpus.simulated_job import Action, SimulatedJob
from unicomm.flight_recorder.formats import operation_names as names
from unicomm.flight_recorder.formats import torch_dump as formats
from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.ring.call_path import frame_in, user_frame
from unicomm.flight_recorder.ring.reader import HEADER, Ring, State
from unicomm.flight_recorder.table.load import load
from unicomm.flight_recorder.texts import parse_ranks


@pytest.fixture(scope="module")
def job():
    step = [
        Action("all_reduce", numel=12, red="SUM", line=3),
        Action("broadcast", numel=7, dtype="int64", root=1, line=4),
        Action("all_gather_single", "odd", numel=2, out_numel=4, line=5),
    ]
    programs = [[c for c in step if c.group == "world" or rank in (1, 3)] * 4 for rank in range(4)]
    for rank, (op, peer) in {1: ("send", 3), 3: ("recv", 1)}.items():
        programs[rank] = [Action(op, "odd", numel=9, peer=peer, line=6), *programs[rank]]
    programs[2] = programs[2][:-2]
    return SimulatedJob(4, programs, {"odd": [1, 3]}).run()


STEP = ["all_reduce", "broadcast", "all_gather_single"]


def write(folder, job, kind):
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(job.size):
        data = job.ring(rank)
        ring = Ring(data)
        if kind == "ring":
            (folder / f"r{rank}").write_bytes(data)
        elif kind == "pickle":
            (folder / f"rank_{rank}").write_bytes(pickle.dumps(formats.to_dict(ring)))
        else:
            (folder / f"rank{rank}.json").write_text(json.dumps(formats.to_dict(ring)))


@pytest.mark.parametrize("kind", ["ring", "pickle", "json"])
def test_all_formats_give_one_table(tmp_path, job, kind):
    write(tmp_path / kind, job, kind)
    table = load([tmp_path / kind])
    assert not table.remarks
    assert [s.rank for s in table.sources] == [0, 1, 2, 3]
    assert (np.diff(table.rank) >= 0).all()
    one = table.source_of[3]
    rows = range(one.begin, one.end)
    assert [table.op_name(r) for r in rows] == ["recv", *STEP * 3, "all_reduce"]
    assert [int(s) for s in table.seq[one.begin : one.end]] == [1, 1, 2, 1, 3, 4, 2, 5, 6, 3, 7]
    groups = {g.name: g.ranks.tolist() for g in table.groups}
    assert groups == {"world": [0, 1, 2, 3], "odd": [1, 3]}
    first = one.begin
    assert (int(table.peer[first]), int(table.kind[first])) == (1, OpKind.RECV)
    calls, call = table.calls, table.call[first]
    assert (int(calls.out_numel[call]), table.dtypes[int(calls.out_dtype[call])]) == (9, "float32")
    assert str(user_frame(table.stack(first))) == "/job/train.py:6"
    assert {int(s) for s in table.state[one.begin : one.end - 1]} == {State.COMPLETED}
    assert int(table.state[one.end - 1]) == State.STARTED
    assert table.shapes[int(table.calls.in_shape[table.call[one.begin + 1]])] == ((12,),)
    assert int(calls.root[table.call[one.begin + 2]]) == (1 if kind == "ring" else -1)
    times = [c[one.begin] for c in (table.created_ns, table.started_ns, table.completed_ns)]
    assert times[0] <= times[1] < times[2]
    report = analyze(table)
    assert (report.main.verdict.value, report.main.culprits) == ("never-joined", [2])


def packed(folder, kind):
    files = sorted(folder.iterdir())
    out = folder.parent / f"dumps.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(out, "w") as archive:
            for f in files:
                archive.write(f, f"job/{f.name}")
    elif kind == "gz":
        out = folder.parent / "gz"
        out.mkdir()
        for f in files:
            (out / f"{f.name}.gz").write_bytes(gzip.compress(f.read_bytes()))
    else:
        with tarfile.open(out, "w:gz" if kind.endswith("gz") else "w") as archive:
            for f in files:
                archive.add(f, f"job/{f.name}")
    return out


@pytest.mark.parametrize("form", ["ring", "pickle"])
@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "gz"])
def test_archives(tmp_path, job, form, kind):
    write(tmp_path / "d", job, form)
    table = load([packed(tmp_path / "d", kind)])
    assert not table.remarks
    assert len(table.sources) == 4
    assert analyze(table).main.culprits == [2]


def test_single_files_and_several_folders(tmp_path, job):
    write(tmp_path / "a", job, "pickle")
    files = sorted((tmp_path / "a").iterdir())
    (tmp_path / "b").mkdir()
    files[3].rename(tmp_path / "b" / "rank_3")
    assert len(load([*files[:3], tmp_path / "b"]).sources) == 4


def test_broken_input_becomes_findings(tmp_path, job):
    write(tmp_path / "d", job, "pickle")
    folder = tmp_path / "d"
    good = (folder / "rank_0").read_bytes()
    (folder / "rank_1").write_bytes(good[:-200])
    (folder / "rank_5").write_bytes(b"")
    (folder / "rank_6").write_bytes(b"\x80\x05junk")
    (folder / "rank_7.json").write_text('{"entries": [')
    (folder / "rank_8.json").write_text('{"other": 1}')
    (folder / "rank_9.tar.gz").write_bytes(gzip.compress(good)[:-20])
    (folder / "rank_10.zip").write_bytes(b"PK\x03\x04broken")
    (folder / "rank_11.ucring").write_bytes(job.ring(0)[:1000])
    (folder / "notes.txt").write_text("not a dump")
    (folder / "core.123").write_bytes(b"\x7fELF")
    table = load([folder, tmp_path / "nowhere"])
    said = {f.path.rsplit("/", 1)[-1].split("!")[0]: f.message for f in table.remarks}
    bad = {"rank_1", "rank_5", "rank_6", "rank_7.json", "rank_8.json", "rank_9.tar.gz", "rank_10.zip"}
    bad |= {"rank_11.ucring", "core.123", "nowhere"}
    assert {k.removesuffix(".gz") for k in said} == {k.removesuffix(".gz") for k in bad}
    assert "notes.txt" not in said
    assert [s.rank for s in table.sources] == [0, 2, 3]
    report = analyze(table)
    assert report.main.culprits == [2]
    assert report.missing == [1]


def test_two_files_of_one_rank(tmp_path, job):
    """The newest counts."""
    import os

    write(tmp_path, job, "ring")
    (tmp_path / "old").write_bytes(job.ring(1))
    os.utime(tmp_path / "old", (1, 1))
    table = load([tmp_path])
    [finding] = table.remarks
    assert finding.path.endswith("old")
    assert "rank 1 has another file" in finding.message


def test_a_copy_of_a_ring_is_left_out_without_a_remark(tmp_path, job):
    for folder in ("0", "failed-0"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "vm-rank00001-77-6b4d6788.ucring").write_bytes(job.ring(1))
    table = load([tmp_path])
    assert [source.rank for source in table.sources] == [1]
    assert not table.remarks


def test_a_rank_that_only_its_messages_tell(tmp_path, job):
    (tmp_path / "dump").write_bytes(pickle.dumps(formats.to_dict(Ring(job.ring(3)))))
    assert load([tmp_path]).sources[0].rank == 3


def test_ranks_as_threads_of_one_process(fresh_recorder):
    import torch

    from unicomm.flight_recorder.recording import writer
    from unicomm.flight_recorder.table.builder import TableBuilder
    from unicomm.testing import run_ranks

    run_ranks(lambda comm: comm.barrier(False), 3, name="threads-as-ranks")
    builder = TableBuilder()
    builder.add_ring(Ring(writer.ring_bytes()))
    table = builder.finish()
    mine = [i for i, g in enumerate(table.groups) if g.name == "threads-as-ranks"]
    assert sorted(table.rank[table.group == mine[-1]].tolist()) == [0, 1, 2]
    assert torch.is_tensor(torch.ones(1))


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("nccl:_all_gather_base", ("nccl", "all_gather_single", -1, -1)),
        ("xccl:all_gather_into_tensor_coalesced", ("xccl", "all_gather_single", -1, -1)),
        ("gloo:all_reduce_barrier", ("gloo", "barrier", -1, -1)),
        ("rcclx:reduce_scatter_v", ("rcclx", "reduce_scatter_v", -1, -1)),
        ("nccl:send 0->12", ("nccl", "send", 0, 12)),
        ("hccl:recv 3<-1", ("hccl", "recv", 3, 1)),
        ("ALLGATHER_coalesced", ("", "all_gather_v", -1, -1)),
        ("", ("", "", -1, -1)),
    ],
)
def test_names(text, parsed):
    assert names.profiling_name(text) == parsed


def test_the_users_frame():
    inner, own = frame_in("/site-packages/torch/distributed/x.py", "f", 1), frame_in("/data/job/t.py", "g", 2)
    assert user_frame((inner, own)) is own
    assert user_frame((inner,)) is inner
    assert user_frame(()) is None


def values():
    plain = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
    return plain | st.lists(plain, max_size=3) | st.dictionaries(st.text(max_size=5), plain, max_size=2)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_values_in_a_dump(tmp_path_factory, job, data):
    """Keys that are missing or hold nonsense never end in a traceback, up to the report."""
    dump = formats.to_dict(Ring(job.ring(3)))
    for _ in range(data.draw(st.integers(1, 6))):
        target = data.draw(st.sampled_from([dump, *dump["entries"][:3], dump["pg_config"]]))
        if isinstance(target, dict) and target:
            target[data.draw(st.sampled_from(sorted(target)))] = data.draw(values())
        if not isinstance(dump["entries"], list) or not isinstance(dump["pg_config"], dict):
            break
        dump["entries"] = [e for e in dump["entries"] if isinstance(e, dict)] or dump["entries"]
    folder = tmp_path_factory.mktemp("any")
    (folder / "rank_3").write_bytes(pickle.dumps(dump))
    table = load([folder])
    assert table.sources or table.remarks
    analyze(table)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_damage_of_a_ring(tmp_path_factory, job, data):
    damaged = bytearray(job.ring(1))
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(8, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("any")
    (folder / "a").write_bytes(damaged)
    (folder / "b").write_bytes(job.ring(2))
    table = load([folder])
    assert table.sources
    analyze(table)


def test_ranks_that_no_job_has_are_damage(tmp_path, job):
    data = bytearray(job.ring(1))
    at = HEADER.fields["rank"][1]
    data[at : at + 4] = (1 << 30).to_bytes(4, "little")
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b").write_bytes(job.ring(2))
    table = load([tmp_path])
    assert [source.rank for source in table.sources] == [2]
    assert "is no rank of a job" in table.remarks[0].message
    analyze(table)
    with pytest.raises(ValueError, match="range of ranks"):
        parse_ranks("0-2,1073741824")


def test_stdin_like_bytes_are_no_archive(tmp_path):
    (tmp_path / "x").write_bytes(io.BytesIO(b"hello").getvalue())
    assert "not a dump" in load([tmp_path / "x"]).remarks[0].message
    (tmp_path / "y.json").write_text(json.dumps([1, 2]))
    assert load([tmp_path / "y.json"]).remarks
