"""Folders for rings whose files every user may remove: refused where rings are written and looked for."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.commands import clean_environment, run
from tests.flight_recorder.rings import write_ring
from unicomm.flight_recorder.ring.files import trusted_owners
from unicomm.flight_recorder.ring.folder import OpenFolderError, rings_folder
from unicomm.flight_recorder.ring.reader import read_folder
from unicomm.flight_recorder.table.load import load
from unicomm.launch.doctor.report import _recorder

STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that UNICOMM_TRACE_DIR names, with a ring."""
    path = tmp_path / "with a blank"
    path.mkdir(mode=0o700)
    write_ring(path / "good.ucring", 0, 2, 3)
    monkeypatch.setenv("UNICOMM_TRACE_DIR", str(path))
    return path


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o702, 0o2777])
def test_an_open_folder_is_refused_with_its_cure(folder, mode):
    folder.chmod(mode)
    with pytest.raises(OpenFolderError) as raised:
        rings_folder()
    assert f"UNICOMM_TRACE_DIR={folder}: " in str(raised.value)
    assert f"`chmod o-w '{folder}'`" in str(raised.value)
    finding = _recorder()
    assert finding.ok is False
    assert "chmod o-w" in finding.detail
    folder.chmod(mode & ~0o002)
    assert rings_folder() == folder


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777, 0o775, 0o2775, 0o770])
def test_sticky_folders_and_those_of_a_group_are_used(folder, mode):
    """Like /tmp and /dev/shm, and like the folders that a umask of 002 and projects on clusters have."""
    folder.chmod(mode)
    assert rings_folder() == folder
    assert _recorder().ok is not False
    assert ("others may write" in _recorder().detail) == bool(mode & 0o022)


def test_a_new_folder_below_an_open_one_is_used(folder, monkeypatch):
    """The cure where nobody may change the folder's mode, such as a volume that many pods mount."""
    folder.chmod(0o777)
    monkeypatch.setenv("UNICOMM_TRACE_DIR", str(folder / "mine"))
    assert rings_folder() == folder / "mine"
    assert (folder / "mine").stat().st_mode & 0o777 == 0o700


def test_a_drive_that_opens_what_is_created(folder, monkeypatch):
    """Some network drives show every folder with mode 0777, whatever it was created with."""
    make = Path.mkdir

    def mkdir(self: Path, *more: object, **others: object) -> None:
        make(self, *more, **others)
        self.chmod(0o777)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setenv("UNICOMM_TRACE_DIR", str(folder / "new"))
    with pytest.raises(OpenFolderError, match="chmod o-w"):
        rings_folder()


@pytest.mark.parametrize("command", [("show",), ("analyze",), ("top", "--once"), ("export",)])
def test_commands_refuse_it(folder, command):
    folder.chmod(0o777)
    environment = clean_environment() | {"UNICOMM_TRACE_DIR": str(folder), "COLUMNS": "400"}
    done = run([sys.executable, "-m", "unicomm", "trace", *command], 60, environment)
    assert done.returncode == 2, done.stdout
    assert "chmod o-w" in done.stderr


def test_a_named_folder_is_read_with_a_remark(folder):
    """Who names a folder to `trace analyze` wants what is there, whoever wrote it."""
    folder.chmod(0o777)
    table = load([folder])
    assert [source.rank for source in table.sources] == [0]
    assert [(r.path, "every user may" in r.message) for r in table.remarks] == [(str(folder), True)]
    folder.chmod(0o1777)
    assert not load([folder]).remarks


@pytest.mark.parametrize("named", ["option", "variable"])
def test_unicomm_run_refuses_it_before_it_starts_anything(folder, tmp_path, named):
    folder.chmod(0o777)
    before = sorted(folder.iterdir())
    (tmp_path / "program.py").write_text("print('started')")
    options = ["--trace-dir", str(folder)] if named == "option" else []
    environment = clean_environment() | ({"UNICOMM_TRACE_DIR": str(folder)} if named == "variable" else {})
    done = run(
        [sys.executable, "-m", "unicomm", "run", *options, str(tmp_path / "program.py")], 60, environment
    )
    assert done.returncode == 2
    assert "started" not in done.stdout
    assert f"{'--trace-dir ' if options else 'UNICOMM_TRACE_DIR='}{folder}: every user may" in done.stderr
    assert "chmod o-w" in done.stderr
    assert sorted(folder.iterdir()) == before


RECORDS = """
import json, sys, warnings
from pathlib import Path
from unicomm.flight_recorder.ring import folder
folder._candidates = lambda: [Path(sys.argv[1])]
from unicomm.flight_recorder.recording.writer import get_recorder
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    recorder = get_recorder({"ops": {}, "dtypes": {}, "reductions": {}}, 0, 1)
print(json.dumps([recorder.path, [str(one.message) for one in told]]))
"""


def test_the_recorder_goes_to_the_private_folder_and_warns(folder, tmp_path):
    """The job goes on, and ranks of a host still find each other's rings when one is missing."""
    folder.chmod(0o777)
    before = sorted(folder.iterdir())
    environment = clean_environment() | {"UNICOMM_TRACE_DIR": str(folder)}
    private = tmp_path / "private"
    done = run([sys.executable, "-c", RECORDS, str(private)], 60, environment)
    assert done.returncode == 0, done.stderr
    path, [said] = json.loads(done.stdout)
    assert Path(path).parent == private
    assert str(private) in said
    assert "chmod o-w" in said
    assert sorted(folder.iterdir()) == before


def test_without_a_private_folder_the_ring_is_in_memory(folder, tmp_path):
    folder.chmod(0o777)
    (tmp_path / "file").write_text("")
    environment = clean_environment() | {"UNICOMM_TRACE_DIR": str(folder)}
    done = run([sys.executable, "-c", RECORDS, str(tmp_path / "file")], 60, environment)
    assert done.returncode == 0, done.stderr
    path, [said] = json.loads(done.stdout)
    assert not path
    assert "no other process can read it" in said


# --- other users --------------------------------------------------------------------------------------


@as_root
def test_files_in_a_folder_that_a_stranger_put_there_are_left_out(tmp_path):
    """Below a folder that is open to all, a stranger may have put another folder in the place of ours."""
    folder = tmp_path / "open" / "rings"
    folder.mkdir(parents=True)
    write_ring(folder / "theirs.ucring", 0, 2, 3)
    for path in (folder, folder / "theirs.ucring"):
        os.chown(path, STRANGER, STRANGER)
    assert [ring.rank for ring in read_folder(folder)[0]] == [0]  # a network drive that maps users
    folder.parent.chmod(0o777)
    rings, remarks = read_folder(folder)
    assert not rings
    assert f"it belongs to user {STRANGER}" in remarks[0].message
    folder.parent.chmod(0o1777)
    assert [ring.rank for ring in read_folder(folder)[0]] == [0]


@as_root
def test_root_is_trusted_below_an_open_folder(tmp_path, monkeypatch):
    """Nobody makes a folder of root's, and volumes that are open at all levels often belong to root."""
    folder = tmp_path / "rings"
    folder.mkdir()
    tmp_path.chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    assert trusted_owners(folder) == {0, STRANGER}
