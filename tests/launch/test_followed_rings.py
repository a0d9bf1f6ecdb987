"""FollowedRings: each operation is counted once, whenever it ends and however often the rings are read."""

import json
import os
import threading
import time

import pytest
import torch

from tests.flight_recorder.rings import ALL_REDUCE, META
from unicomm import _core
from unicomm.flight_recorder.metrics import catalogue
from unicomm.flight_recorder.ring.endings import describe_exception, describe_exits, describe_process
from unicomm.launch.exporter import followed_rings
from unicomm.launch.exporter.followed_rings import FollowedRings

X = [torch.ones(2, 3)]
RECORDS = 64


class Writer:
    """A rank of two that writes a ring."""

    def __init__(self, folder, rank, uid="u"):
        folder.mkdir(exist_ok=True)
        path = folder / f"h-rank{rank:05d}-{uid}.ucring"
        self.recorder = _core.Recorder(str(path), META, rank, 2, RECORDS)
        self.comm = self.recorder.add_comm(
            name="main", backend="shm", uid=uid, ranks="0-1", rank=rank, size=2
        )
        self.seq = 0

    def begin(self):
        self.seq += 1
        return self.recorder.begin(self.comm, ALL_REDUCE, self.seq, self.seq, X, X, 1)

    def do(self, count):
        for _ in range(count):
            self.recorder.finish(self.begin())


@pytest.fixture
def rings(monkeypatch):
    monkeypatch.setattr(followed_rings, "_FRESH", 0.0)
    return FollowedRings()


def counted(rings, metric=catalogue.OPERATIONS):
    """The values of a counter by rank."""
    return {int(labels[0]): value for one, labels, value in rings.samples() if one is metric}


def test_each_operation_counts_once(tmp_path, rings):
    writers = [Writer(tmp_path, rank) for rank in (0, 1)]
    rings.follow(tmp_path)
    assert counted(rings) == {}
    for _ in range(10):
        writers[0].do(7)
        writers[1].do(5)
        done = counted(rings)
        assert done == counted(rings)
    assert done == {0: 70, 1: 50}
    assert counted(rings, catalogue.LOST) == {0: 0, 1: 0}
    assert counted(rings, catalogue.COLLECTIVES) == {0: 70, 1: 50}


def states(rings):
    """The states that ranks have."""
    found = [labels for one, labels, value in rings.samples() if one is catalogue.STATE and value]
    return {int(rank): state for rank, state in found}


def test_rank_is_dead_only_once_it_has_ended(tmp_path, rings):
    # A process notes who it is when it begins, long before it has a ring.
    file = tmp_path / "h-rank00000-1.ending"
    process = describe_process(0, 7, "h", 0, "", 0)
    file.write_text(json.dumps(process))
    rings.follow(tmp_path)
    assert states(rings) == {0: "unknown"}
    file.write_text(json.dumps(process | describe_exception(ValueError("x"), 1)))
    assert states(rings) == {0: "dead"}
    file.write_text(json.dumps(process))
    for code, state in ((-9, "dead"), (0, "ended")):
        (tmp_path / "h.exits").write_text(describe_exits("h", {0: code}, {0: 7}, {}, 1))
        assert states(rings) == {0: state}


@pytest.mark.parametrize("name", ["a\u200bb", "a\x1bb"])
def test_folder_whose_name_cannot_be_printed(tmp_path, rings, name):
    writer = Writer(tmp_path / name, 0)
    writer.do(3)
    rings.follow(tmp_path / name)
    assert counted(rings) == {0: 3}


def test_error_in_the_last_count_does_not_stop_the_next(tmp_path, rings, monkeypatch, capsys):
    rings.follow(tmp_path / "first")
    writer = Writer(tmp_path / "second", 0)
    writer.do(3)
    with monkeypatch.context() as patched:
        patched.setattr(rings, "_count", lambda: 1 / 0)
        rings.follow(tmp_path / "second")
    assert "not counted: ZeroDivisionError" in capsys.readouterr().err
    assert counted(rings) == {0: 3}


def test_operations_that_end_late_and_out_of_order(tmp_path, rings):
    writer = Writer(tmp_path, 0)
    rings.follow(tmp_path)
    open_ones = [writer.begin() for _ in range(20)]
    writer.do(3)
    assert counted(rings) == {0: 3}
    for record in open_ones[::2]:
        writer.recorder.finish(record)
    assert counted(rings) == {0: 13}
    writer.do(30)
    for record in open_ones[1::2]:
        writer.recorder.finish(record)
    assert counted(rings) == {0: 53}
    assert counted(rings, catalogue.LOST) == {0: 0}


def test_what_was_overwritten_is_lost_and_said(tmp_path, rings):
    writer = Writer(tmp_path, 0)
    rings.follow(tmp_path)
    writer.do(10)
    counted(rings)
    writer.do(RECORDS + 25)
    assert counted(rings) == {0: 10 + RECORDS}
    assert counted(rings, catalogue.LOST) == {0: 25}
    unfinished = writer.begin()
    counted(rings)
    writer.do(RECORDS)  # the last one over the first one, as the unfinished one keeps its place
    assert counted(rings) == {0: 10 + 2 * RECORDS - 1}
    assert counted(rings, catalogue.LOST) == {0: 26}
    assert counted(rings, catalogue.COLLECTIVES) == {0: writer.seq}
    writer.recorder.finish(unfinished)
    assert counted(rings) == {0: 10 + 2 * RECORDS}
    assert counted(rings, catalogue.LOST) == {0: 26}
    assert counted(rings, catalogue.COLLECTIVES) == {0: writer.seq}


def test_the_next_attempt_goes_on(tmp_path, rings):
    first = Writer(tmp_path / "0", 0)
    rings.follow(tmp_path / "0")
    first.do(10)
    rings.follow(tmp_path / "1")  # its last operations count, although nobody has asked
    second = Writer(tmp_path / "1", 0, "v")
    second.do(4)
    assert counted(rings) == {0: 14}
    assert counted(rings, catalogue.COLLECTIVES) == {0: 14}


def test_a_thread_keeps_up_between_scrapes(tmp_path, rings):
    """It counts in time when half of the ring is new, and leaves idle rings alone."""
    writer = Writer(tmp_path, 0)
    rings.follow(tmp_path)
    assert not rings._filling()
    for _ in range(8):
        writer.do(RECORDS // 2 + 1)
        assert rings._filling()
        with rings._lock:
            rings._count()
        assert not rings._filling()
    assert counted(rings) == {0: 8 * (RECORDS // 2 + 1)}
    assert counted(rings, catalogue.LOST) == {0: 0}


def test_damaged_rings_and_other_files_do_no_harm(tmp_path, rings):
    writer = Writer(tmp_path, 0)
    (tmp_path / "h-rank00001-2.ucring").write_bytes(b"UCRING01" + os.urandom(500))
    (tmp_path / "h-rank00002-2.ucring").write_bytes(b"")
    (tmp_path / "h-rank00000-9.ending").write_bytes(b"{")
    rings.follow(tmp_path)
    writer.do(3)
    assert counted(rings) == {0: 3}
    assert not rings._filling()


def test_many_records_cost_little(tmp_path, rings, monkeypatch):
    """The bound is ten times what it takes: for a machine that does much else."""
    monkeypatch.setattr("tests.launch.test_followed_rings.RECORDS", 4096)
    writers = [Writer(tmp_path, rank) for rank in range(2)]
    for writer in writers:
        writer.do(4096)
    rings.follow(tmp_path)
    began = time.process_time()
    assert counted(rings) == {0: 4096, 1: 4096}
    assert time.process_time() - began < 0.7


def test_a_pipe_beside_rings_is_not_waited_for(rings, tmp_path):
    """Whoever opened it would wait for a writer, and no scrape would be answered any more."""
    writer = Writer(tmp_path / "rings", 0)
    for name in ("a.ucring", "a.ending", "a.stacks", "a.exits"):
        os.mkfifo(tmp_path / "rings" / name)
    rings.follow(tmp_path / "rings")
    writer.do(3)
    done = []
    thread = threading.Thread(target=lambda: done.append((counted(rings), rings._filling())), daemon=True)
    thread.start()
    thread.join(60)
    assert done == [({0: 3}, False)]


def test_an_operation_under_way_is_counted_however_late_it_ends(tmp_path, rings):
    writer = Writer(tmp_path, 0)
    rings.follow(tmp_path)
    late = writer.begin()
    for _ in range(10):
        writer.do(RECORDS // 2)
        counted(rings)
    assert counted(rings) == {0: 10 * RECORDS // 2}
    assert counted(rings, catalogue.LOST) == {0: 0}
    writer.recorder.finish(late)
    assert counted(rings) == {0: 10 * RECORDS // 2 + 1}
    assert counted(rings, catalogue.LOST) == {0: 0}
