"""Ending files: read, joined, and held to damage; stacks asked for from running processes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from unicomm.comms.errors import InvalidArgumentError, PeerLostError
from unicomm.flight_recorder.ring import endings, stacks
from unicomm.flight_recorder.ring.endings import EndingError, EndingFiles, is_consequence, signal_name
from unicomm.flight_recorder.ring.places import Place, is_library, user_place
from unicomm.flight_recorder.ring.stacks import ask_for_stacks, parse_stacks

ASKED = """Process state: sleeping
Thread 0x00007f0000000001 (most recent call first):
  File "/env/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f0000000002 (most recent call first):
  File "/env/lib/python3.11/selectors.py", line 415 in select
  File "/job/data.py", line 88 in load_batch
  File "/job/train.py", line 30 in <module>
"""
TERMINATED = ASKED.replace("Process state: sleeping\n", "").replace("line 88", "line 91")
CRASHED = "Fatal Python error: Segmentation fault\n\n" + ASKED.partition("\n")[2]


def files(**more):
    """An ending file of rank 1 with more keys, as bytes."""
    own = endings.describe_process(1, 77, "node0", 5, "pid:[1]", 58)
    return json.dumps(own | more).encode()


# --- stacks -----------------------------------------------------------------------------------------------


def test_the_main_thread_of_a_dump_is_the_last_one():
    found = parse_stacks(ASKED)
    assert (found.activity, found.crash, found.terminated) == ("sleeping", "", False)
    assert [len(thread.frames) for thread in found.threads] == [1, 3]
    assert found.main[1] == Place("/job/data.py", 88, "load_batch")


def test_the_last_of_two_dumps_counts_and_tells_of_sigterm():
    found = parse_stacks(ASKED + TERMINATED, at_ns=7)
    assert found.terminated
    assert found.main[1].line == 91
    assert len(found.threads) == 2
    assert parse_stacks(TERMINATED).terminated
    assert found.at_ns == 7


@pytest.mark.parametrize(
    ("said", "name"), [("Segmentation fault", "SIGSEGV"), ("Aborted", "SIGABRT"), ("Bus error", "SIGBUS")]
)
def test_a_crash(said, name):
    found = parse_stacks(ASKED + CRASHED.replace("Segmentation fault", said))
    assert found.crash == name
    assert not found.terminated
    assert found.main[1].line == 88


def test_a_crash_in_another_thread_than_the_main_one():
    head, _, rest = CRASHED.partition("Thread")
    swapped = head + rest.replace("Current thread", "Thread")
    text = head + "Current thread" + swapped.removeprefix(head)
    assert parse_stacks(text).main[0].function == "run"


@pytest.mark.parametrize("text", ["", "hello", "Process state: running\n", '  File "x", line 1 in f\n'])
def test_texts_without_a_dump(text):
    assert parse_stacks(text).main == ()


# --- places -----------------------------------------------------------------------------------------------


def test_the_users_own_place_is_the_innermost_outside_of_libraries():
    library = "/env/lib/python3.11/site-packages/numpy/core.py"
    frames = [
        Place(library, 7, "stack"),
        Place("/job/data.py", 88, "load"),
        Place("/job/train.py", 3, "main"),
    ]
    assert user_place(frames, ()) == frames[1]
    assert user_place(frames, ("/job/data.py",)) == frames[2]
    assert user_place(frames[:1], ()) == frames[0]
    assert user_place([], ()) is None
    assert is_library("<frozen runpy>", ())
    assert not is_library("/data/me/lib/train.py", ("",))


# --- exceptions -------------------------------------------------------------------------------------------


def raised_from(cause, error):
    try:
        try:
            raise cause
        except BaseException:
            raise error  # noqa: B904
    except BaseException as found:
        return found


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("bad batch"), False),
        (InvalidArgumentError("a wrong root"), False),
        (InvalidArgumentError("[all_to_all #3, communicator 'dp', rank 0] this rank sends 5 rows"), False),
        (PeerLostError("rank 1 has left"), True),
        (raised_from(PeerLostError("rank 1 has left"), RuntimeError("training failed")), True),
        (RuntimeError("[all_reduce #3, communicator 'dp', rank 0] rank 1 has left"), True),
        (
            RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
            True,
        ),
        (KeyboardInterrupt(), True),
    ],
)
def test_exceptions_that_follow_from_another_rank(error, expected):
    assert is_consequence(error) is expected


def test_a_circle_of_causes_ends():
    one, other = ValueError("a"), ValueError("b")
    one.__cause__, other.__cause__ = other, one
    assert not is_consequence(one)


# --- joined -----------------------------------------------------------------------------------------------


def test_files_of_a_process_and_of_its_launcher_are_joined():
    found = EndingFiles()
    found.add("rings/a.ending", files(ended_ns=9, exit_call=[], exit_argument=3))
    found.add("rings/a.stacks", ASKED.encode(), 12)
    found.add(
        "x.tar!rings/l.exits",
        endings.describe_exits("node0", {1: -9, 4: 2}, {1: 77}, {1: "dmesg"}, 5).encode(),
    )
    one, four = found.joined()
    assert (one.rank, one.pid, one.exit_code, one.out_of_memory, one.ended_ns) == (1, 77, -9, "dmesg", 9)
    assert one.stacks.activity == "sleeping"
    assert (four.rank, four.name, four.exit_code, four.ended_ns) == (4, "", 2, 5)


def test_a_process_that_does_not_know_its_rank_has_that_of_its_ring():
    found = EndingFiles()
    found.add("a.ending", files(rank=-1))
    assert found.joined() == []
    assert [e.rank for e in found.joined({"a": 3})] == [3]


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"nothing", b'{"format": 2}', b'{"format": 1, "rank": "x"}']
)
@pytest.mark.parametrize("name", ["a.ending", "a.exits"])
def test_damaged_files_are_told(name, data):
    with pytest.raises(EndingError):
        EndingFiles().add(name, data)


def test_names_of_signals():
    assert [signal_name(code) for code in (-9, -15, 3, 0)] == ["SIGKILL", "SIGTERM", "", ""]
    assert signal_name(-signal.SIGRTMAX + 1).startswith("signal ")


# --- asking -----------------------------------------------------------------------------------------------

PROGRAM = """
import sys, time
from pathlib import Path
from unicomm.flight_recorder.recording import ending

def wait_for_data():
    print("ready", flush=True)
    time.sleep(100)

ending.begin(Path(sys.argv[1]), 0)
if len(sys.argv) > 2:
    import signal
    signal.signal(int(sys.argv[2]), signal.SIG_IGN)
wait_for_data()
"""


@pytest.fixture
def sleeper(tmp_path):
    """`sleeper(*more)` starts a process that has said how to ask it, and waits in `wait_for_data`."""
    started = []

    def start(*more):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), *map(str, more)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def stacks_in(folder):
    return [parse_stacks(path.read_text()) for path in folder.glob("*.stacks")]


def test_a_running_process_says_where_it_is(sleeper, tmp_path):
    process = sleeper()
    assert ask_for_stacks(tmp_path, seconds=30) == 1
    (found,) = stacks_in(tmp_path)
    assert found.main[0].function == "wait_for_data"
    assert found.activity in ("running", "sleeping")
    assert process.poll() is None
    assert ask_for_stacks(tmp_path) == 0, "it was asked a moment ago"


def test_sigterm_ends_a_process_as_before_and_leaves_its_place(sleeper, tmp_path):
    process = sleeper()
    process.terminate()
    assert process.wait(30) == -signal.SIGTERM
    (found,) = stacks_in(tmp_path)
    assert found.terminated
    assert found.main[0].function == "wait_for_data"


def test_a_program_that_took_the_signal_is_not_asked(sleeper, tmp_path):
    process = sleeper(signal.SIGRTMAX - 6)
    assert ask_for_stacks(tmp_path) == 0
    assert process.poll() is None


FORKS = """
import os, signal, sys
from pathlib import Path
from unicomm.flight_recorder.recording import ending

ending.begin(Path(sys.argv[1]), 0)
if os.fork() == 0:
    (line,) = [line for line in open("/proc/self/status") if line.startswith("SigIgn")]
    print(int(line.split()[1], 16) >> (signal.SIGRTMAX - 7) & 1, flush=True)
    os._exit(0)
os.wait()
"""
ENDS = """
import ctypes, sys
from pathlib import Path
from unicomm.flight_recorder.recording import ending

ending.begin(Path(sys.argv[1]), 0)
ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).getchar)  # waits here when Python has ended
sys.exit(3)
"""


def test_who_asks_at_the_last_moment_does_not_end_the_process(tmp_path, eventually):
    """Python has removed the handler between the look at it and the signal."""
    command = [sys.executable, "-c", ENDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        eventually(lambda: list(tmp_path.glob("*.ending")))
        (path,) = tmp_path.glob("*.ending")
        number = json.loads(path.read_text())["stack_signal"]
        eventually(lambda: not stacks._is_caught(process.pid, number))
        process.send_signal(number)
        process.stdin.close()
        assert process.wait(30) == 3


def test_a_forked_child_has_the_signal_as_it_was(tmp_path):
    said = subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], capture_output=True, check=True)
    assert said.stdout.split() == [b"0"]


def test_a_stopped_process_is_left_alone(sleeper, tmp_path, monkeypatch):
    monkeypatch.setattr(stacks.shutil, "which", lambda _: None)
    process = sleeper()
    os.kill(process.pid, signal.SIGSTOP)
    while stacks.process_code(process.pid) != "T":
        time.sleep(0.01)
    assert ask_for_stacks(tmp_path) == 0
    assert stacks_in(tmp_path)[0].activity == "stopped"


@pytest.mark.parametrize(
    "change", [{"ticks": 1}, {"pid_namespace": "pid:[0]"}, {"pid": 1 << 30}, {"pid": "x"}]
)
def test_another_process_with_the_same_number_is_not_asked(sleeper, tmp_path, change):
    process = sleeper()
    (path,) = tmp_path.glob("*.ending")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert ask_for_stacks(tmp_path) == 0
    assert process.poll() is None
