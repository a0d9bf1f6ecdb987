"""Copies of rings: they say how the process was, wherever and whenever they are read, and may be shorter."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.flight_recorder.rings import write_ring
from unicomm.flight_recorder.live import snapshot as live
from unicomm.flight_recorder.ring.copies import copied, folder_copies, freeze
from unicomm.flight_recorder.ring.folder import boot_id
from unicomm.flight_recorder.ring.reader import COPY_STATES, Ring, RingError, read_folder, read_ring
from unicomm.flight_recorder.table.load import load
from unicomm.flight_recorder.table.table import KILLED, RUNNING


@pytest.mark.parametrize("state", COPY_STATES[1:])
def test_a_copy_says_how_its_process_was(tmp_path, state):
    write_ring(tmp_path / "a.ucring", 0, 2, 5, unfinished=True)
    data = (tmp_path / "a.ucring").read_bytes()
    ring = Ring(copied(data, state))
    assert ring.copied_as == state
    assert ring.process_state == {"sleeping": "running"}.get(state, state)
    assert ring.process_activity == {"killed": "dead"}.get(state, state)
    assert Ring(data).copied_as == ""
    assert Ring(data).process_state == "running"  # it is this process
    # A copy of a copy is of that state, too.
    assert Ring(copied(copied(data, "ended"), state)).copied_as == state


def test_time_stands_still_in_a_copy(tmp_path):
    write_ring(tmp_path / "a.ucring", 0, 2, 5, unfinished=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/a.ucring").write_bytes(copied((tmp_path / "a.ucring").read_bytes(), "running"))
    first, second = (live.look(tmp_path / "b").jobs[0].ranks[0].operation.seconds for _ in range(2))
    assert first == second > 0
    one, two = (load([tmp_path / "b"]).sources[0] for _ in range(2))
    assert (one.process, one.as_of_ns) == (RUNNING, two.as_of_ns)


def test_the_newest_records(tmp_path):
    write_ring(tmp_path / "a.ucring", 0, 2, 150, records=64)  # wrapped
    data = (tmp_path / "a.ucring").read_bytes()
    whole, short = Ring(data), Ring(copied(data, "running", 10))
    assert len(whole.records) == 64
    assert short.records["id"].tolist() == list(range(141, 151))
    assert np.array_equal(short.records, whole.records[-10:])
    assert short.total == 150
    assert short.wrapped
    assert [c.coll_completed for c in short.comms] == [150]
    assert [str(f) for f in short.frames] == [str(f) for f in whole.frames]
    assert len(Ring(copied(data, "running", 1000)).records) == 64
    assert len(Ring(copied(data, "running", 1)).records) == 1


def test_what_is_not_over_is_kept_however_old(tmp_path):
    recorder = write_ring(tmp_path / "a.ucring", 0, 2, 5, records=64, unfinished=True)
    import torch

    for seq in range(6, 40):
        recorder.finish(recorder.begin(0, 4, seq, seq, [torch.ones(2)], [torch.ones(2)], 1))
    short = Ring(copied((tmp_path / "a.ucring").read_bytes(), "running", 4))
    assert short.records["id"].tolist() == list(range(5, 40))


@pytest.mark.parametrize("data", [b"", b"nothing", b"UCRING01" + bytes(20), b"UCRING01" + bytes(300)])
def test_no_ring(data):
    with pytest.raises(RingError):
        copied(data, "running")


def test_unknown_state(tmp_path):
    write_ring(tmp_path / "a.ucring", 0, 1, 1)
    with pytest.raises(ValueError, match="dead"):
        copied((tmp_path / "a.ucring").read_bytes(), "dead")


def _dead_ring(folder):
    """A ring of a process that was killed."""
    code = f"""
import os, sys
from pathlib import Path
from tests.flight_recorder.rings import write_ring
ring = write_ring(Path({str(folder)!r}) / "dead.ucring", 1, 2, 5)
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == -9


def test_a_folder_as_it_is_now(tmp_path):
    rings, frozen = tmp_path / "rings", tmp_path / "frozen"
    rings.mkdir()
    mine = write_ring(rings / "mine.ucring", 0, 2, 5)
    _dead_ring(rings)
    (rings / "broken.ucring").write_bytes(b"UCRING01" * 9)
    (rings / "note.txt").write_text("no ring")
    assert [name for name, _ in folder_copies(rings)] == ["dead.ucring", "mine.ucring"]
    assert freeze(rings, frozen)
    assert not freeze(rings, frozen)
    mine.close(True)  # the copies have nothing to do with what happens later
    states = {r.rank: r.process_state for r in read_folder(frozen)[0]}
    assert states == {0: "running", 1: "killed"}
    assert {s.rank: s.process for s in load([frozen]).sources} == {0: RUNNING, 1: KILLED}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frozen", "rings"]
    # Who was alive until somebody ended it counts as running.
    pid = read_ring(rings / "dead.ucring").pid
    assert [Ring(data).process_state for _, data in folder_copies(rings, running=[pid])] == ["running"]


def test_a_process_elsewhere_is_not_called_killed(tmp_path):
    data = write_ring(tmp_path / "a.ucring", 0, 2, 5).snapshot()
    data = data.replace(boot_id().encode(), b"another-boot".ljust(len(boot_id())))
    (tmp_path / "a.ucring").write_bytes(data)
    ((_, copy),) = folder_copies(tmp_path)
    assert Ring(copy).process_state == "elsewhere"
    assert int(Ring(copy).header["last_mono_ns"]) == int(Ring(data).header["last_mono_ns"])


def test_a_copy_of_a_copy_is_as_old(tmp_path):
    (tmp_path / "a.ucring").write_bytes(copied(write_ring(tmp_path / "own", 0, 2, 5).snapshot(), "stopped"))
    ((_, copy),) = folder_copies(tmp_path)
    assert copy == (tmp_path / "a.ucring").read_bytes()


def test_many_freeze_at_once(tmp_path):
    rings = tmp_path / "rings"
    rings.mkdir()
    kept = [write_ring(rings / f"{i}.ucring", i, 4, 5) for i in range(4)]
    first = []
    threads = [threading.Thread(target=lambda: first.append(freeze(rings, tmp_path / "f"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(first) == [False] * 7 + [True]
    assert len(read_folder(tmp_path / "f")[0]) == len(kept)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "rings"]


def test_an_empty_folder(tmp_path):
    (tmp_path / "rings").mkdir()
    assert freeze(tmp_path / "rings", tmp_path / "f")
    assert not freeze(tmp_path / "rings", tmp_path / "f")
    assert list((tmp_path / "f").iterdir()) == []
