"""What lies in a folder for rings does not hold up, or mislead, whoever looks at the rings there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import clean_environment, run
from tests.flight_recorder.rings import write_ring
from unicomm.comms.errors import CommTimeoutError
from unicomm.comms.failures import missing_ranks
from unicomm.flight_recorder.live.snapshot import look
from unicomm.flight_recorder.recording import ending, writer
from unicomm.flight_recorder.ring import files
from unicomm.flight_recorder.ring.copies import freeze
from unicomm.flight_recorder.ring.folder import clean, is_alive, pid_namespace, process_start_ticks
from unicomm.flight_recorder.ring.reader import RingError, read_folder, read_ring
from unicomm.flight_recorder.ring.stacks import ask_for_stacks
from unicomm.flight_recorder.table.load import load
from unicomm.launch.doctor.report import _recorder
from unicomm.launch.hub.gather import RingFolders
from unicomm.launch.hub.gather import look as look_by_hub

STRANGER = 54321


class HeldUp(BaseException):
    """Not an OSError, which readers make a remark of."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise HeldUp(f"held up for {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A folder with one good ring, and traps with the names of rings and of ending files."""
    folder = tmp_path / "rings"
    folder.mkdir()
    write_ring(folder / "good.ucring", 0, 2, 3)
    elsewhere = tmp_path / "elsewhere"
    write_ring(elsewhere, 1, 2, 3)
    for suffix in (".ucring", ".ending", ".stacks", ".exits", ".json"):
        os.mkfifo(folder / f"fifo{suffix}")
        (folder / f"zero{suffix}").symlink_to("/dev/zero")
        (folder / f"linked{suffix}").symlink_to(elsewhere)
        (folder / f"folder{suffix}").mkdir()
    return folder


def test_traps_hold_up_no_reader(trapped, tmp_path, monkeypatch):
    with within(30):
        rings, remarks = read_folder(trapped)
        assert [ring.rank for ring in rings] == [0]
        said = {os.path.basename(remark.path): remark.message for remark in remarks}
        kinds = {"fifo": "a FIFO", "zero": "a link", "linked": "a link", "folder": "a folder"}
        assert all(kind in said[f"{name}.ucring"] for name, kind in kinds.items())
        assert [rank.rank for job in look(trapped).jobs for rank in job.ranks if rank.pid] == [0]
        table = load([trapped])
        assert [source.rank for source in table.sources] == [0]
        assert sum("a FIFO" in remark.message for remark in table.remarks) == 5
        assert sum("a link" in remark.message for remark in table.remarks) == 10
        ask_for_stacks(trapped)
        assert freeze(trapped, tmp_path / "frozen")
        assert [path.name for path in (tmp_path / "frozen").iterdir()] == ["good.ucring"]
        folders = RingFolders(trapped, tmp_path / "later", tmp_path / "job")
        assert [ring.name for ring in look_by_hub(folders, 10).rings] == ["good.ucring"]
        assert clean(trapped, max_bytes=0) == []
        assert [is_alive(trapped / f"{name}.ucring") for name in ("fifo", "zero")] == [None, None]
        monkeypatch.setenv("UNICOMM_TRACE_DIR", str(trapped))
        assert _recorder().ok is not None
    assert not any(path.is_file() for path in trapped.glob("fifo*"))


def test_a_timeout_is_explained_beside_traps(trapped, monkeypatch):
    """The error of a deadline was lost: its thread never came back from opening a FIFO."""
    monkeypatch.setattr(writer, "recorder_path", lambda: trapped / "good.ucring")
    error = CommTimeoutError("all_reduce timed out", culprits=(0,))
    with within(30):
        missing_ranks.explain(error, "u1")
    assert "rank 0 was last in all_reduce #3" in error.message


@pytest.mark.parametrize("command", [("show",), ("analyze",), ("top", "--once")])
def test_commands_beside_traps(command, trapped):
    words = [sys.executable, "-m", "unicomm", "trace", command[0], trapped, *command[1:]]
    done = run(words, 60, clean_environment())
    assert done.returncode in (0, 1), done.stderr
    assert "a FIFO" in done.stdout + done.stderr


def test_a_named_link_is_read(trapped):
    assert read_ring(trapped / "linked.ucring").rank == 1
    assert [source.rank for source in load([trapped / "linked.ucring"]).sources] == [1]
    with within(10):
        for name, kind in (("fifo", "a FIFO"), ("zero", "a device")):
            with pytest.raises(RingError, match=kind):
                read_ring(trapped / f"{name}.ucring")
            assert kind in load([trapped / f"{name}.ucring"]).remarks[0].message


def test_no_more_is_read_than_allowed(tmp_path):
    path = tmp_path / "huge.ucring"
    with path.open("wb") as file:
        file.truncate(files.MOST_BYTES + 1)  # a sparse file, which takes no room
    with pytest.raises(RingError, match="more than the"):
        read_ring(path)
    assert "more than the" in load([tmp_path]).remarks[0].message
    side = tmp_path / "huge.stacks"
    with side.open("wb") as file:
        file.truncate(files.MOST_SIDE_BYTES + 1)
    assert any("more than the" in r.message and r.path == str(side) for r in load([tmp_path]).remarks)


# --- other users --------------------------------------------------------------------------------------------

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")


@as_root
def test_rings_of_strangers_are_left_out_where_nobody_named_them(tmp_path):
    for name in ("mine", "theirs"):
        write_ring(tmp_path / f"{name}.ucring", ("mine", "theirs").index(name), 2, 3)
    os.chown(tmp_path / "theirs.ucring", STRANGER, STRANGER)
    rings, remarks = read_folder(tmp_path)
    assert [ring.rank for ring in rings] == [0]
    assert f"it belongs to user {STRANGER}" in remarks[0].message
    assert [s.rank for s in load([tmp_path], named=False).sources] == [0]
    assert [s.rank for s in load([tmp_path]).sources] == [0, 1]
    assert clean(tmp_path, max_files=0, max_bytes=0) == []
    # The owner of the folder could replace every file in it, and network drives change owners.
    os.chown(tmp_path, STRANGER, STRANGER)
    assert [ring.rank for ring in read_folder(tmp_path)[0]] == [0, 1]


def asks(folder: Path) -> Path:
    """An ending file of this process's parent, which would have to write its stacks."""
    facts = {
        "format": 1,
        "pid": os.getppid(),
        "ticks": process_start_ticks(os.getppid()),
        "pid_namespace": pid_namespace(),
        "stack_signal": 0,
    }
    path = folder / "other.ending"
    path.write_text(json.dumps(facts))
    return path


def test_asking_for_stacks_writes_into_no_other_file(tmp_path):
    target = tmp_path / "precious"
    folder = tmp_path / "rings"
    folder.mkdir()
    asks(folder)
    stacks = folder / "other.stacks"
    for make in (stacks.symlink_to, stacks.hardlink_to):
        target.write_text("precious")
        os.utime(target, (0, 0))
        make(target)
        assert ask_for_stacks(folder, 0.1) == 0
        assert target.read_text() == "precious"
        stacks.unlink()
    stacks.write_text("")
    ask_for_stacks(folder, 0.1)
    assert stacks.read_text().startswith("Process state: ")


def test_odd_ending_files_ask_nobody(tmp_path):
    path = asks(tmp_path)
    (tmp_path / "other.stacks").write_text("")
    facts = json.loads(path.read_text())
    for odd in (10**400, -1, 2**64, 1e308, "--5", None, []):
        path.write_text(json.dumps(facts | {"pid": odd}))
        assert ask_for_stacks(tmp_path, 0.1) == 0
    path.write_text("[" * 100_000)
    assert ask_for_stacks(tmp_path, 0.1) == 0


@as_root
def test_a_strangers_ending_file_sends_no_signal(tmp_path):
    os.chown(asks(tmp_path), STRANGER, STRANGER)
    os.chown(tmp_path, STRANGER, STRANGER)
    stacks = tmp_path / "other.stacks"
    stacks.write_text("")
    ask_for_stacks(tmp_path, 0.1)
    assert stacks.read_text() == ""


def test_an_ending_file_is_not_written_through_a_link(tmp_path, monkeypatch):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    folder = tmp_path / "rings"
    folder.mkdir()
    path = folder / "mine.ending"
    (folder / ".mine.ending.part").symlink_to(precious)
    monkeypatch.setattr(ending, "_path", path)
    monkeypatch.setattr(ending, "_pid", os.getpid())
    ending._write({"ended_ns": 1})
    assert precious.read_text() == "precious"
    assert json.loads(path.read_text())["ended_ns"] == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
