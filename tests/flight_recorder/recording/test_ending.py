"""How a process ends: what it leaves beside its ring, in real processes."""

import json
import signal
import subprocess
import sys

import pytest

from tests.commands import clean_environment
from tests.processes.forked_interpreters import run
from unicomm.flight_recorder.table.load import load

BEGIN = """
import faulthandler, os, signal, sys, threading
import multiprocessing
from unicomm.testing import run_ranks

def load_batch():
    {fault}

if __name__ == "__main__":
    {before}
    run_ranks(lambda comm: comm.barrier(async_op=False), 1)
    load_batch()
"""


@pytest.fixture
def program(tmp_path):
    """`program(fault)` runs a program that makes a communicator, then gets a fault."""

    def start(fault, before="pass", **more):
        file = tmp_path / "program.py"
        file.write_text(BEGIN.format(fault=fault, before=before))
        env = clean_environment() | {"UNICOMM_TRACE_DIR": str(tmp_path / "rings")} | more
        return run([sys.executable, file], env=env)

    return start


def ending(tmp_path):
    """What the only process left: its file, and where its stacks are."""
    (file,) = (tmp_path / "rings").glob("*.ending")
    return json.loads(file.read_text()), file.with_suffix(".stacks").read_text()


def test_an_exception(program, tmp_path):
    done = program("raise ValueError('bad batch 7\\nand more')")
    assert done.returncode == 1
    assert "ValueError: bad batch 7" in done.stderr
    raised = ending(tmp_path)[0]["raised"]
    assert (raised["type"], raised["message"], raised["consequence"]) == ("ValueError", "bad batch 7", False)
    assert raised["frames"][0]["function"] == "load_batch"
    assert list((tmp_path / "rings").glob("*.ucring"))


@pytest.mark.parametrize(("code", "argument"), [("3", 3), ("'no data'", 1), ("-1", 255)])
def test_a_call_of_exit(program, tmp_path, code, argument):
    done = program(f"sys.exit({code})")
    assert done.returncode == argument
    said = ending(tmp_path)[0]
    assert said["exit_argument"] == argument
    assert said["exit_call"][0]["function"] == "load_batch"
    assert list((tmp_path / "rings").glob("*.ucring")), "the ring of a rank that fails stays"


def test_an_exception_that_ends_in_exit(program, tmp_path):
    """As in torch.multiprocessing, which prints the error and ends its process."""
    program("""
    try:
        raise KeyError("weights")
    except KeyError:
        sys.exit(1)""")
    assert ending(tmp_path)[0]["raised"]["type"] == "KeyError"


def test_a_crash(program, tmp_path):
    done = program("import ctypes; ctypes.string_at(0)")
    assert done.returncode == -signal.SIGSEGV
    text = ending(tmp_path)[1]
    assert text.startswith("Fatal Python error: Segmentation fault")
    assert "in load_batch" in text


@pytest.mark.parametrize("fault", ["pass", "sys.exit(0)", "sys.exit()"])
def test_a_good_end_leaves_nothing(program, tmp_path, fault):
    assert program(fault).returncode == 0
    assert not list((tmp_path / "rings").iterdir())


def test_nothing_is_kept_where_nothing_is_wanted(program, tmp_path):
    program("raise ValueError", UNICOMM_TRACE_KEEP="never")
    assert not list((tmp_path / "rings").iterdir())


def test_the_programs_own_handlers_stay(program, tmp_path):
    """Crashes are told where the program wants them; its exception hook is called; its SIGTERM is its own."""
    done = program(
        "signal.raise_signal(signal.SIGTERM)",
        "faulthandler.enable(); signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))",
    )
    assert done.returncode == 4
    done = program("import ctypes; ctypes.string_at(0)", "faulthandler.enable()")
    assert "Segmentation fault" in done.stderr


def test_an_exception_that_the_programs_hook_hides(program, tmp_path):
    done = program("raise ValueError", "sys.excepthook = lambda *_: print('mine')")
    assert "mine" in done.stdout
    assert ending(tmp_path)[0]["raised"]["type"] == "ValueError"
    assert list((tmp_path / "rings").glob("*.ucring"))


IN_A_THREAD = "thread = threading.Thread(target=sys.exit, args=(2,)); thread.start(); thread.join()"


@pytest.mark.parametrize(("exits", "end"), [("sys.exit(2)", "sys.exit(0)"), (IN_A_THREAD, "pass")])
def test_an_exit_that_ends_nothing(program, tmp_path, exits, end):
    """One that the program catches, and one of a thread."""
    before = f"""import threading
    try:
        {exits}
    except SystemExit:
        pass"""
    assert program(end, before).returncode == 0
    assert not list((tmp_path / "rings").iterdir())


def test_a_fork_leaves_the_files_of_its_parent_alone(program, tmp_path):
    """A crash, a SIGTERM and an exception in children of the process are not the process's own."""
    done = program("""
    import ctypes
    for end in (lambda: ctypes.string_at(0), lambda: os.kill(os.getpid(), signal.SIGTERM)):
        if (child := os.fork()) == 0:
            end()
        os.waitpid(child, 0)
    child = multiprocessing.get_context("fork").Process(target=int, args=("x",))
    child.start()
    child.join()
    raise ValueError("in the parent")""")
    assert done.returncode == 1, done.stderr
    said, text = ending(tmp_path)
    assert said["raised"]["message"] == "in the parent"
    assert text == ""


def test_a_fork_keeps_the_handler_that_the_program_has_set_since(program):
    done = program("""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    if (child := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7""")
    assert done.returncode == 0, done.stderr


def test_a_process_of_multiprocessing(program, tmp_path):
    program(
        "pass",
        """
    def child():
        run_ranks(lambda comm: comm.barrier(async_op=False), 1)
        raise ValueError("in the child")
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 1""",
    )
    assert ending(tmp_path)[0]["raised"]["message"] == "in the child"


def test_the_message_of_an_exception_may_fail(program, tmp_path):
    done = program("raise type('Bad', (Exception,), {'__str__': lambda self: 1 / 0})")
    assert done.returncode == 1
    assert "Bad" in done.stderr


def test_a_table_of_endings_alone(tmp_path):
    """`trace analyze` of a job all of whose ranks failed before their first communicator."""
    from unicomm.flight_recorder.analysis.analyze import analyze
    from unicomm.flight_recorder.ring.endings import describe_exits

    (tmp_path / "a.exits").write_text(describe_exits("node0", {0: 1, 1: 1}, {}, {}, 5))
    table = load([tmp_path])
    assert not table.sources
    assert not table.empty
    report = analyze(table)
    assert report.main.culprits == [0, 1]
    command = [sys.executable, "-m", "unicomm", "trace", "analyze", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert "ended with exit code 1" in done.stdout, done.stderr
