"""Where rings live, and when they go."""

import os
import signal
import stat
import subprocess
import sys
import time

import pytest

from tests import ROOT
from tests.flight_recorder.rings import python, write_ring
from unicomm.flight_recorder.ring import folder as folder_module
from unicomm.flight_recorder.ring.folder import (
    CLEAN_CLOSE,
    FolderError,
    boot_id,
    clean,
    is_alive,
    process_start_ticks,
    ring_name,
    rings_folder,
)
from unicomm.flight_recorder.ring.reader import read_folder, read_ring

WRITE = """
import os, sys
from unicomm.flight_recorder.recording.writer import get_recorder
r = get_recorder({"ops": {"4": "all_reduce"}, "dtypes": {}, "reductions": {}}, 3, 8)
c = r.add_comm("main", "shm", "u", "0-7", 3, 8)
r.begin(c, 4, 1, 0, [], [])
print(r.path, flush=True)
"""


@pytest.fixture
def env(tmp_path):
    return os.environ | {"UNICOMM_TRACE_DIR": str(tmp_path)}


def run(code, env):
    process = python(code, env)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_default_folder_is_private(monkeypatch, tmp_path):
    monkeypatch.delenv("UNICOMM_TRACE_DIR", raising=False)
    monkeypatch.setattr(folder_module, "_candidates", lambda: [tmp_path / "rings"])
    path = rings_folder()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize("attack", ["link", "open", "file"])
def test_a_prepared_folder_is_not_used(monkeypatch, tmp_path, attack):
    monkeypatch.delenv("UNICOMM_TRACE_DIR", raising=False)
    trap, good = tmp_path / "trap", tmp_path / "good"
    if attack == "link":
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(mode=0o700)
        trap.symlink_to(elsewhere)
    elif attack == "open":
        trap.mkdir()
        trap.chmod(0o777)
    else:
        trap.write_text("")
    monkeypatch.setattr(folder_module, "_candidates", lambda: [trap, good])
    assert rings_folder() == good
    monkeypatch.setattr(folder_module, "_candidates", lambda: [trap])
    with pytest.raises(FolderError, match="set UNICOMM_TRACE_DIR"):
        rings_folder()


def test_given_folder_is_made(monkeypatch, tmp_path):
    monkeypatch.setenv("UNICOMM_TRACE_DIR", str(tmp_path / "a" / "b"))
    assert rings_folder().is_dir()
    (tmp_path / "f").write_text("")
    monkeypatch.setenv("UNICOMM_TRACE_DIR", str(tmp_path / "f" / "x"))
    with pytest.raises(FolderError, match="UNICOMM_TRACE_DIR"):
        rings_folder()


def test_names():
    assert ring_name(7, 42).split("-")[-3:-1] == ["rank00007", "42"]
    assert "solo" in ring_name(-1, 1)
    assert ring_name(0, 1) != ring_name(0, 1)


def test_clean_exit_removes_the_ring(env, tmp_path):
    code, out, err = run(WRITE, env)
    assert code == 0, err
    assert str(tmp_path) in out
    assert list(tmp_path.iterdir()) == []


def test_unhandled_exception_keeps_it(env, tmp_path):
    code, _, err = run(WRITE + "raise RuntimeError('boom')", env)
    assert code == 1
    assert "boom" in err
    [ring], findings = read_folder(tmp_path)
    assert findings == []
    assert ring.rank == 3
    assert ring.closed
    assert ring.process_state == "ended"


@pytest.mark.parametrize(("keep", "ending", "left"), [("always", "", 1), ("never", "raise SystemError", 0)])
def test_keep(env, tmp_path, keep, ending, left):
    run(WRITE + ending, env | {"UNICOMM_TRACE_KEEP": keep})
    assert len(list(tmp_path.iterdir())) == left


@pytest.mark.parametrize(
    ("name", "value"),
    [("UNICOMM_TRACE_KEEP", "maybe"), ("UNICOMM_TRACE_RECORDS", "many"), ("UNICOMM_TRACE_RECORDS", "1")],
)
def test_bad_settings(env, name, value):
    code, _, err = run(WRITE, env | {name: value})
    assert code == 1
    assert f"{name}={value!r}" in err


def test_killed_and_stopped(env, tmp_path):
    """A ring is read while its process is stopped, and after it was killed in the middle."""
    process = python(WRITE + "sys.stdin.read()", env, stdin=-1)
    path = process.stdout.readline().strip()
    assert read_ring(path).process_state == "running"
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert read_ring(path).process_state == "stopped"
    assert is_alive(read_path(path)) is True
    process.kill()
    process.wait(timeout=30)
    ring = read_ring(path)
    assert ring.process_state == "killed"
    assert is_alive(read_path(path)) is False
    assert [ring.op(r) for r in ring.records] == ["all_reduce"]
    process.communicate()


def read_path(text):
    from pathlib import Path

    return Path(text)


def test_a_forked_child_leaves_the_parents_ring(env, tmp_path):
    code, _, err = run(
        WRITE
        + """
pid = os.fork()
if pid == 0:
    own = get_recorder({"ops": {}, "dtypes": {}, "reductions": {}}, 3, 8)
    assert own.path != r.path
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert os.path.exists(r.path)
r.begin(c, 4, 2, 0, [], [])
assert r.total() == 2
""",
        env,
    )
    assert code == 0, err
    assert list(tmp_path.iterdir()) == []


def test_no_folder_falls_back_to_memory(env, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, err = run(WRITE, env | {"UNICOMM_TRACE_DIR": str(tmp_path / "file" / "x")})
    assert code == 0, err
    assert "UNICOMM_TRACE_DIR" in err
    assert out.strip() == ""


def test_clean_removes_only_dead_rings(tmp_path):
    alive = write_ring(tmp_path / "alive.ucring", 0, 1, 1)
    data = bytearray(alive.snapshot())
    data[32:40] = (1).to_bytes(8, "little")  # a process that started at another time: gone
    for i in range(4):
        dead = tmp_path / f"dead{i}.ucring"
        dead.write_bytes(data)
        os.utime(dead, (1e9 + i, 1e9 + i))
    (tmp_path / "foreign.ucring").write_text("somebody's file")
    old_but_alive = tmp_path / "alive.ucring"
    os.utime(old_but_alive, (1e9, 1e9))
    assert [p.name for p in clean(tmp_path, max_files=3, max_age_days=1e6)] == [
        "dead0.ucring",
        "dead1.ucring",
    ]
    assert len(clean(tmp_path, max_bytes=0, max_age_days=1e6)) == 2
    assert {p.name for p in tmp_path.iterdir()} == {"alive.ucring", "foreign.ucring"}
    for name in ("x", "y"):
        (tmp_path / f"{name}.ucring").write_bytes(data)
    os.utime(tmp_path / "x.ucring", (1e9, 1e9))
    assert [p.name for p in clean(tmp_path, max_age_days=1)] == ["x.ucring"]


def test_clean_leaves_the_rings_of_other_hosts(tmp_path):
    """In a folder that hosts share, nobody knows here whether the processes of the others run."""
    data = write_ring(tmp_path / "mine.ucring", 0, 1, 1).snapshot()
    (tmp_path / "mine.ucring").unlink()
    other = data.replace(boot_id().encode(), b"another-boot".ljust(len(boot_id())))
    for i in range(4):
        (tmp_path / f"other{i}.ucring").write_bytes(other)
    assert is_alive(tmp_path / "other0.ucring") is None
    for at, days in enumerate((1, 60, 10, 10)):
        then = time.time() - days * 86400
        os.utime(tmp_path / f"other{at}.ucring", (then, then))
    assert [path.name for path in clean(tmp_path, max_age_days=3)] == ["other1.ucring"]
    (tmp_path / "killed.ucring").write_bytes(data[:32] + (1).to_bytes(8, "little") + data[40:])
    assert is_alive(tmp_path / "killed.ucring") is False
    assert clean(tmp_path, max_files=3) == []  # the rings of others take no room from this host's
    (tmp_path / "killed.ucring").unlink()
    # Beyond the bounds, those go that are older than the rings of this host may become.
    removed = clean(tmp_path, max_files=0, max_age_days=3)
    assert sorted(path.name for path in removed) == ["other2.ucring", "other3.ucring"]
    closed = bytearray(other)
    closed[28] |= CLEAN_CLOSE
    (tmp_path / "closed.ucring").write_bytes(closed)
    assert is_alive(tmp_path / "closed.ucring") is False
    assert [path.name for path in clean(tmp_path, max_files=0)] == ["closed.ucring"]


def test_a_name_that_is_cut_in_a_character():
    """The kernel keeps the first 15 bytes of a process's name, whatever they are."""
    code = "import ctypes; ctypes.CDLL(None).prctl(15, '\u00fc' * 8); print(flush=True); input()"
    process = python(code, dict(os.environ), stdin=-1)
    process.stdout.readline()
    assert process_start_ticks(process.pid)
    process.communicate("\n", timeout=60)


def test_odd_arguments_and_folders(env, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        WRITE + "from unicomm.flight_recorder.ring.reader import read_ring\nread_ring(r.path)\n"
    )
    command = [sys.executable, program, *["\u4e2d" * 30_000] * 4]
    done = subprocess.run(
        command, env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    code, out, err = run(WRITE, env | {"UNICOMM_TRACE_DIR": os.fsdecode(bytes(tmp_path) + b"/\xff")})
    assert code == 0, err
    assert "is not valid UTF-8; name a folder that is" in err
    assert out.strip() == ""


def test_reading_needs_no_torch():
    code, _, err = run(
        """
import sys
import unicomm.flight_recorder.ring.reader, unicomm.flight_recorder.ring.folder
import unicomm.flight_recorder.formats.torch_dump
import unicomm.flight_recorder.reports.rings_text, unicomm.launch.cli
assert "torch" not in sys.modules and "unicomm._core" not in sys.modules
""",
        dict(os.environ),
    )
    assert code == 0, err
