"""Places in a ring: which records are kept, and to which communicator they belong."""

import os
import threading

import numpy as np
import torch

from tests.flight_recorder.rings import ALL_REDUCE, META
from unicomm import _core
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.flight_recorder.ring.reader import read_ring
from unicomm.flight_recorder.table.load import load

TENSOR = [torch.ones(2)]


def test_an_operation_under_way_is_not_overwritten(tmp_path):
    """What hangs is what readers look for, however many operations of other communicators follow."""
    recorder = _core.Recorder(str(tmp_path / "a.ucring"), META, 0, 2, 16)
    hung, other = (recorder.add_comm(name, "shm", name, "0-1", 0, 2) for name in ("hung", "other"))
    first = recorder.begin(hung, ALL_REDUCE, 1, 1, TENSOR, TENSOR)
    queued = recorder.begin(hung, ALL_REDUCE, 2, 2, TENSOR, TENSOR, start_now=False)
    for seq in range(1, 101):
        recorder.finish(recorder.begin(other, ALL_REDUCE, seq, seq + 2, TENSOR, TENSOR))
    assert recorder.total() == read_ring(tmp_path / "a.ucring").total == 102
    for ring in (read_ring(tmp_path / "a.ucring"), read_ring(recorder.snapshot())):
        assert ring.records["seq"].tolist() == [1, 2, *range(87, 101)]
        assert ring.kept.tolist() == [True] * 2 + [False] * 14
        assert [ring.comms[c].name for c in ring.records["comm"][:3]] == ["hung", "hung", "other"]
    recorder.finish(first)
    recorder.finish(queued)
    here = read_ring(tmp_path / "a.ucring")
    assert here.comms[0].coll_completed == 2
    for seq in range(101, 131):
        recorder.finish(recorder.begin(other, ALL_REDUCE, seq, seq + 2, TENSOR, TENSOR))
    here = read_ring(tmp_path / "a.ucring")
    assert here.records["seq"].tolist() == list(range(115, 131))
    assert not here.kept.any()


def test_more_operations_under_way_than_records(tmp_path):
    recorder = _core.Recorder(str(tmp_path / "a.ucring"), META, 0, 2, 16)
    comm = recorder.add_comm("c", "shm", "u", "0-1", 0, 2)
    begun = [recorder.begin(comm, ALL_REDUCE, seq, seq, TENSOR, TENSOR) for seq in range(1, 101)]
    assert recorder.total() == read_ring(tmp_path / "a.ucring").total == 100
    assert 100 in read_ring(tmp_path / "a.ucring").records["seq"]
    for record in begun:
        recorder.finish(record)
    recorder.finish(recorder.begin(comm, ALL_REDUCE, 101, 101, TENSOR, TENSOR))
    assert read_ring(tmp_path / "a.ucring").comms[0].coll_completed == 101


def test_half_of_the_ring_is_for_new_operations(tmp_path):
    recorder = _core.Recorder(str(tmp_path / "a.ucring"), META, 0, 2, 64)
    comm = recorder.add_comm("c", "shm", "u", "0-1", 0, 2)
    for seq in range(1, 65):
        recorder.begin(comm, ALL_REDUCE, seq, seq, TENSOR, TENSOR)
    for seq in range(65, 365):
        recorder.finish(recorder.begin(comm, ALL_REDUCE, seq, seq, TENSOR, TENSOR))
    here = read_ring(tmp_path / "a.ucring")
    assert here.records["seq"].tolist() == [*range(1, 33), *range(333, 365)]
    assert here.total == 364


def test_records_of_a_communicator_whose_place_another_one_has(tmp_path):
    """After 255 communicators, places are given again, those of the ones closed longest ago first."""
    recorder = _core.Recorder(str(tmp_path / "a.ucring"), META, 0, 2, 1024)
    for i in range(300):
        comm = recorder.add_comm(f"c{i}", "shm", f"u{i}", "0-1", 0, 2)
        recorder.finish(recorder.begin(comm, ALL_REDUCE, i + 1, i, TENSOR, TENSOR))
        recorder.set_comm_state(comm, 2, f"u{i}")
    here = read_ring(tmp_path / "a.ucring")
    assert len(here.records) == 255  # the other 45 have no communicator any more
    names = {here.comms[int(r["comm"])].name: int(r["seq"]) for r in here.records}
    assert names == {f"c{i}": i + 1 for i in range(45, 300)}


def test_a_communicator_closes_its_own_place_only(tmp_path):
    recorder = _core.Recorder(str(tmp_path / "a.ucring"), META, 0, 2, 16)
    places = [recorder.add_comm(f"c{i}", "shm", f"u{i}", "0-1", 0, 2) for i in range(255)]
    recorder.set_comm_state(places[7], 3, "u7")  # broken
    assert recorder.add_comm("new", "shm", "new", "0-1", 0, 2) == places[7]
    recorder.set_comm_state(places[7], 3, "u7")  # and finalized later
    assert read_ring(tmp_path / "a.ucring").comms[7].state == "open"
    assert recorder.add_comm("newer", "shm", "newer", "0-1", 0, 2) != places[7]


def test_more_open_communicators_than_places(tmp_path):
    recorder = _core.Recorder(str(tmp_path / "a.ucring"), META, 0, 2, 1024)
    for i in range(260):
        comm = recorder.add_comm(f"c{i}", "shm", f"u{i}", "0-1", 0, 2)
        recorder.finish(recorder.begin(comm, ALL_REDUCE, 1, i, TENSOR, TENSOR))
        if i > 255:
            recorder.set_comm_state(comm, 2, f"u{i}")
    table = load([tmp_path])
    assert [remark.message for remark in table.remarks] == [
        "it has more than 255 open communicators; those of the others are unknown"
    ]
    assert np.count_nonzero(table.group < 0) == 5
    assert np.bincount(table.group[table.group >= 0]).tolist() == [1] * 255
    assert analyze(table).main.verdict is Verdict.GOOD


def test_no_torn_record_is_read(tmp_path):
    """While one thread writes round and round, each record that is read has the numbers of one operation."""
    recorder = _core.Recorder(str(tmp_path / "a.ucring"), META, 0, 2, 64)
    comm = recorder.add_comm("c", "shm", "u", "0-1", 0, 2)
    done = threading.Event()

    def write():
        seq = 0
        while not done.is_set():
            seq += 1
            recorder.finish(recorder.begin(comm, ALL_REDUCE, seq, seq, [], [], batch=seq, start_now=False))

    thread = threading.Thread(target=write)
    thread.start()
    read = 0
    try:
        for _ in range(1000):
            for ring in (read_ring(tmp_path / "a.ucring"), read_ring(recorder.snapshot())):
                records = ring.records
                read += len(records)
                assert (records["seq"] == records["batch"]).all()
                assert (records["seq"] == records["id"]).all()
    finally:
        done.set()
        thread.join()
    assert read > 0


def test_a_forked_child_has_a_thread_of_its_own():
    def thread_of(recorder):
        recorder.begin(recorder.add_comm("c", "shm", "u", "0", 0, 1), ALL_REDUCE, 1, 1, [], [])
        return int(read_ring(recorder.snapshot()).records["tid"][0])

    assert thread_of(_core.Recorder("", META, 0, 1, 16)) == threading.get_native_id()
    child = os.fork()
    if child == 0:
        os._exit(0 if thread_of(_core.Recorder("", META, 0, 1, 16)) == os.getpid() else 1)
    assert os.waitpid(child, 0)[1] == 0
