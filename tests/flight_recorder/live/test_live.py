"""The model of the live view, over rings of this process and of none."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from tests.flight_recorder.rings import ALL_REDUCE, META, RECV, SEND
from unicomm import _core
from unicomm.flight_recorder.live import snapshot as live
from unicomm.flight_recorder.live import top
from unicomm.flight_recorder.ring.reader import read_ring
from unicomm.launch.cli import app

ONE = [torch.ones(2, 3)]


class Rings:
    """Rings of ranks that this process plays; `dead` makes one that of a process that is gone."""

    def __init__(self, folder, world):
        self.folder, self.world, self.recorders = folder, world, {}

    def __getitem__(self, rank):
        if rank not in self.recorders:
            path = self.folder / f"{rank}.ucring"
            self.recorders[rank] = _core.Recorder(str(path), META, rank, self.world, 64)
        return self.recorders[rank]

    def comm(self, name, members, rank, uid=None):
        text = ",".join(map(str, members))
        return self[rank].add_comm(name, "shm", uid or name, text, members.index(rank), len(members))

    def call(self, rank, comm, seq, state=3, **more):
        record = self[rank].begin(comm, ALL_REDUCE, seq, seq, ONE, ONE, 1, **more)
        if state != 2:
            self[rank].finish(record, state, 2 if state == 4 else 0)
        return record

    def dead(self, rank, closed=False):
        """Ends the process of a rank: its ring stays."""
        recorder = self.recorders.pop(rank)
        if closed:
            recorder.close(False)
        data = bytearray(recorder.snapshot())
        data[32:40] = (1).to_bytes(8, "little")  # the pid is another process's now
        path = self.folder / f"{rank}.ucring"
        path.unlink()
        path.write_bytes(data)


def ranks_of(job):
    return {rank.rank: rank for rank in job.ranks}


def text_of(snapshot, height=None, width=220):
    from rich.console import Console

    console = Console(width=width, height=height, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    frame = top.draw(snapshot, "here", width) if height is None else top.fitting(snapshot, "here", console)
    console.print(frame)
    return console.export_text()


def test_a_rank_that_has_not_come(tmp_path):
    rings = Rings(tmp_path, 3)
    for rank in range(3):
        comm = rings.comm("main", [0, 1, 2], rank)
        rings.call(rank, comm, 1)
        if rank != 1:
            rings.call(rank, comm, 2, state=2)
    [job] = live.look(tmp_path).jobs
    ranks = ranks_of(job)
    assert ranks[0].waits_for == ranks[2].waits_for == [1]
    assert not ranks[0].operation.over
    assert ranks[1].operation.over
    assert job.blockers == [live.Blocker(1, [0, 2])]
    assert job.cycle == []
    operation = ranks[0].operation
    assert (operation.name, operation.seq, operation.size) == ("all_reduce", 2, 24)
    assert operation.arguments == "float32[2x3] SUM"
    assert operation.file == __file__
    assert operation.line > 0
    assert 0 <= operation.seconds < 100
    assert ranks[0].process in ("running", "sleeping")
    text = text_of(live.look(tmp_path))
    assert "last did all_reduce #1 of 'main'" in text
    assert "held up: 0,2" in text


def test_all_have_come_and_nobody_is_to_blame(tmp_path):
    rings = Rings(tmp_path, 2)
    for rank in range(2):
        rings.call(rank, rings.comm("main", [0, 1], rank), 1, state=2)
    [job] = live.look(tmp_path).jobs
    assert [rank.waits_for for rank in job.ranks] == [[], []]
    assert job.blockers == []


def test_a_killed_rank_holds_up_even_where_it_had_come(tmp_path):
    rings = Rings(tmp_path, 3)
    for rank in range(3):
        rings.call(rank, rings.comm("main", [0, 1, 2], rank), 1, state=2)
    rings.dead(1)
    [job] = live.look(tmp_path).jobs
    assert ranks_of(job)[1].process == "dead"
    assert ranks_of(job)[1].operation.seconds is None
    assert job.blockers == [live.Blocker(1, [0, 2])]
    rings.dead(0)
    rings.dead(2)
    [job] = live.look(tmp_path).jobs
    assert [rank.waits_for for rank in job.ranks] == [[], [], []]  # who was first, nobody can tell


def test_after_everything_was_killed_the_one_who_had_not_come_is_named(tmp_path):
    rings = Rings(tmp_path, 3)
    for rank in range(3):
        comm = rings.comm("main", [0, 1, 2], rank)
        rings.call(rank, comm, 1)
        if rank != 2:
            rings.call(rank, comm, 2, state=2)
        rings.dead(rank)
    [job] = live.look(tmp_path).jobs
    assert job.blockers == [live.Blocker(2, [0, 1])]


def test_those_whose_operation_failed_are_victims(tmp_path):
    rings = Rings(tmp_path, 3)
    for rank in range(3):
        rings.call(rank, rings.comm("main", [0, 1, 2], rank), 1, state=2 if rank == 1 else 4)
        rings.dead(rank, closed=rank != 1)
    [job] = live.look(tmp_path).jobs
    assert job.blockers == [live.Blocker(1, [0, 2])]
    assert ranks_of(job)[0].operation.error == "peer lost"
    assert "failed (peer lost)" in text_of(live.look(tmp_path))


def test_a_circle_across_groups(tmp_path):
    rings = Rings(tmp_path, 2)
    for rank in range(2):
        comms = [rings.comm(name, [0, 1], rank) for name in ("tp", "dp")]
        rings.call(rank, comms[rank], 1, state=2)
    [job] = live.look(tmp_path).jobs
    assert sorted(job.cycle) == [0, 1]
    assert job.blockers == []
    text = text_of(live.look(tmp_path))
    assert "in a cycle" in text
    assert "of 'tp'" in text
    assert "of 'dp'" in text


def test_those_who_wait_for_a_waiting_one_are_held_up_by_who_it_waits_for(tmp_path):
    rings = Rings(tmp_path, 3)
    tp = {rank: rings.comm("tp", [0, 1], rank) for rank in (0, 1)}
    dp = {rank: rings.comm("dp", [1, 2], rank) for rank in (1, 2)}
    rings.call(0, tp[0], 1, state=2)
    rings.call(1, dp[1], 1, state=2)
    [job] = live.look(tmp_path).jobs
    assert job.blockers == [live.Blocker(2, [0, 1])]


@pytest.mark.parametrize("sent", [False, True])
def test_messages(tmp_path, sent):
    rings = Rings(tmp_path, 4)
    comms = {rank: rings.comm("pairs", [1, 3], rank) for rank in (1, 3)}
    rings[1].begin(comms[1], RECV, 1, 1, [], ONE, peer=1, flags=2 | 8)
    if sent:
        rings[3].begin(comms[3], SEND, 1, 1, ONE, [], peer=0, flags=2)
    else:
        rings[3].begin(comms[3], SEND, 2, 1, ONE, [], peer=0, flags=2)  # another message
    [job] = live.look(tmp_path).jobs
    assert ranks_of(job)[1].waits_for == ([] if sent else [3])
    assert ranks_of(job)[1].operation.arguments == "float32[2x3] from 3"  # its rank in the job


def test_members_without_a_ring(tmp_path):
    """Ranks elsewhere are to blame only where no rank here is."""
    rings = Rings(tmp_path, 4)
    main = [0, 1, 2, 3]
    rings.call(0, rings.comm("main", main, 0), 1, state=2)
    rings.call(1, rings.comm("main", main, 1), 1, state=2)
    [job] = live.look(tmp_path).jobs
    assert [rank.waits_for for rank in job.ranks] == [[2, 3], [2, 3], [], []]
    assert [rank.process for rank in job.ranks[2:]] == ["absent", "absent"]
    assert {blocker.rank for blocker in job.blockers} == {2, 3}
    assert "no ring on this host" in text_of(live.look(tmp_path))
    rings.comm("main", main, 2)
    [job] = live.look(tmp_path).jobs
    assert [rank.waits_for for rank in job.ranks] == [[2], [2], []]


def test_ranks_that_are_threads_of_one_process(tmp_path):
    recorder = _core.Recorder(str(tmp_path / "a.ucring"), META, -1, 1, 64)
    comms = [recorder.add_comm("main", "shm", "u", "0-2", rank, 3) for rank in range(3)]
    for rank in (0, 2):
        recorder.begin(comms[rank], ALL_REDUCE, 1, 1, ONE, ONE, 1)
    [job] = live.look(tmp_path).jobs
    assert [rank.rank for rank in job.ranks] == [0, 1, 2]
    assert [rank.operations for rank in job.ranks] == [1, 0, 1]
    assert job.blockers == [live.Blocker(1, [0, 2])]


def test_queued_operations_are_counted_and_the_oldest_under_way_is_shown(tmp_path):
    rings = Rings(tmp_path, 2)
    comm = rings.comm("main", [0, 1], 0)
    rings.comm("main", [0, 1], 1)
    rings.call(0, comm, 1)
    for seq in (2, 3, 4):
        rings.call(0, comm, seq, state=2, start_now=seq == 2)
    operation = ranks_of(live.look(tmp_path).jobs[0])[0].operation
    assert (operation.seq, operation.state, operation.pending) == (2, "started", 2)


def test_jobs_are_told_apart_and_those_that_are_over_left_out(tmp_path):
    old, new = Rings(tmp_path, 1), Rings(tmp_path, 1)
    old.comm("main", [0], 0, uid="old")
    old.dead(0)
    (tmp_path / "0.ucring").rename(tmp_path / "old.ucring")
    new.comm("main", [0], 0, uid="new")
    other = Rings(tmp_path, 1)
    other.recorders[0] = _core.Recorder(str(tmp_path / "other.ucring"), META, 0, 1, 64)
    other.comm("main", [0], 0, uid="other")
    (tmp_path / "noise.ucring").write_bytes(b"noise")
    snapshot = live.look(tmp_path)
    assert (len(snapshot.jobs), snapshot.older) == (2, 1)
    assert "ended jobs" in text_of(snapshot)
    assert "noise.ucring" in text_of(snapshot)
    assert len(live.look(tmp_path, everything=True).jobs) == 3


def test_many_ranks_share_lines_and_small_screens_are_not_overrun(tmp_path):
    rings = Rings(tmp_path, 40)
    everyone = list(range(40))
    for rank in everyone:
        comm = rings.comm("main", everyone, rank)
        if rank != 17:
            rings.call(rank, comm, 1, state=2)
    text = text_of(live.look(tmp_path))
    assert "0-16,18-39" in text
    assert "39 processes" in text
    assert "held up: 0-16,18-39" in text
    small = Rings(tmp_path / "small", 20)
    small.folder.mkdir()
    for rank in range(20):
        small.comm("main", list(range(20)), rank)
    assert len(text_of(live.look(small.folder), height=15).splitlines()) <= 15
    assert "more ranks do not fit" in text_of(live.look(small.folder), height=15)


def busy(folder):
    """Ranks in groups with names as process groups have them; rank 1 is dead."""
    rings = Rings(folder, 4)
    for rank in range(4):
        pair = [0, 1] if rank < 2 else [2, 3]
        comm = rings.comm(f"mesh_tp (ranks {pair[0]}-{pair[1]})", pair, rank)
        rings.call(rank, comm, 122 if rank == 1 else 123, state=2 if rank == 0 else 3)
    rings.dead(1)


def test_a_frame_fits_120_columns(tmp_path):
    busy(tmp_path)
    lines = text_of(live.look(tmp_path), width=120).splitlines()
    assert max(map(len, lines)) <= 120
    assert "\u2026" not in "".join(lines)
    (of_rank_0,) = [line for line in lines if line.split()[:1] == ["0"]]  # one line, which has everything
    for word in ("all_reduce", "mesh_tp (ranks 0-1)", "123", "float32[2x3]", "test_live.py:"):
        assert word in of_rank_0
    assert of_rank_0.split()[-1] == "1"  # waits for it
    narrow = text_of(live.look(tmp_path), width=80).splitlines()
    assert max(map(len, narrow)) <= 80
    assert "\u2026" not in "".join(narrow)


def test_a_file_gets_whole_frames(tmp_path):
    busy(tmp_path)
    command = [sys.executable, "-m", "unicomm", "trace", "top", str(tmp_path), "--interval", "0.05"]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, env=environment)
        try:
            deadline = time.monotonic() + 60
            while (tmp_path / "log").read_text().count("4 ranks:") < 3:
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
    text = (tmp_path / "log").read_text()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 120
    frames = text.split("\n\n")[:-1]
    assert len(frames) >= 3
    for frame in frames:
        assert "4 ranks:" in frame.splitlines()[0]
        assert re.findall(r"(?m)^ +(\d)  ", frame) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *(("float32", 4), ("bfloat16", 2), ("float8_e4m3fn", 1), ("bool", 1), ("complex128", 16), ("", 1)),
        *(("int4", 1), (f"int{10**20}", 1), ("int" + 5000 * "9", 1), ("int٣٢", 1)),
    ],
)
def test_item_size(dtype, size):
    assert live.item_size(dtype) == size


def test_json_is_plain_data(tmp_path):
    rings = Rings(tmp_path, 1)
    rings.call(0, rings.comm("main", [0], 0), 1)
    done = CliRunner().invoke(app, ["trace", "top", str(tmp_path), "--json"])
    assert done.exit_code == 0
    [job] = json.loads(done.stdout)["jobs"]
    assert job["ranks"][0]["operation"]["name"] == "all_reduce"
    assert read_ring(tmp_path / "0.ucring").pid == job["ranks"][0]["pid"]


@pytest.mark.parametrize("option", ["--once", "--json"])
def test_nothing_to_show(tmp_path, option):
    done = CliRunner().invoke(app, ["trace", "top", str(tmp_path), option])
    assert done.exit_code == 2
    assert "UNICOMM_TRACE_DIR" in done.stderr
