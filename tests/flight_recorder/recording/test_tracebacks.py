"""Tracebacks of errors that end a program, a thread or a process: the user's lines, without unicomm's own."""

import re
import sys

import pytest

from tests.commands import clean_environment
from tests.processes.forked_interpreters import run
from unicomm.comms.errors import CommError, MismatchError
from unicomm.flight_recorder.recording import tracebacks

START = """
import multiprocessing, sys, threading
import torch, unicomm

def call():
    with unicomm.new_comm("shm", "cpu", name="c") as comm:
        comm.set_timeout(5)
    comm.all_reduce(torch.ones(2), unicomm.ReduceOp.SUM, async_op=False)  # after finalize

def hooked():
    def hook(*_):
        raise ValueError("of the user")
    with unicomm.new_comm("shm", "cpu", name="c") as comm:
        comm.register_pre_hook(hook)
        comm.barrier(async_op=False)

def raised_from():
    try:
        call()
    except unicomm.CommError as error:
        raise RuntimeError("training failed") from error

def of_a_thread():
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()

def of_a_process():
    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    process.join()

def bug():
    from unicomm.comms.execution.engine import Engine
    Engine.check_open = lambda *_: 1 / 0
    call()

if __name__ == "__main__":
    {what}()
"""


def frames(what, tmp_path, **environment):
    """Runs a program to its end; returns the (file, function) of the traceback on stderr, and stderr."""
    program = tmp_path / "program.py"
    program.write_text(START.replace("{what}", what))
    done = run([sys.executable, program], env=clean_environment() | environment)
    return re.findall(r'(?m)^ *File "([^"]+)", line \d+, in (.+)$', done.stderr), done.stderr


def own(found):
    return [file for file, _ in found if "/unicomm/" in file]


@pytest.mark.parametrize("what", ["call", "of_a_thread", "of_a_process"])
def test_only_the_users_lines_are_shown(what, tmp_path):
    found, text = frames(what, tmp_path)
    assert not own(found), text
    assert [function for _, function in found][-1] == "call"
    assert "comm.all_reduce(torch.ones(2)" in text
    assert "NotReadyError" in text or "finalize" in text


@pytest.mark.parametrize("what", ["call", "of_a_thread", "of_a_process"])
def test_all_frames_on_request(what, tmp_path):
    found, text = frames(what, tmp_path, UNICOMM_FULL_TRACEBACK="1")
    assert len(own(found)) >= 1, text


def test_the_error_behind_another_one_is_short_too(tmp_path):
    found, text = frames("raised_from", tmp_path)
    assert not own(found), text
    assert "training failed" in text
    assert "the direct cause" in text


@pytest.mark.parametrize(("what", "error"), [("hooked", "ValueError"), ("bug", "ZeroDivisionError")])
def test_other_errors_keep_all_frames(what, error, tmp_path):
    """They may be faults of unicomm."""
    found, text = frames(what, tmp_path)
    assert error in text
    assert own(found), text


def raised():
    try:
        raise MismatchError("different calls")
    except CommError as error:
        return error


def test_the_error_itself_is_not_changed():
    error = raised()
    whole = error.__traceback__
    with tracebacks.shown(error):
        pass
    assert error.__traceback__ is whole


def test_a_traceback_of_own_frames_alone_stays_whole(monkeypatch):
    monkeypatch.setattr(tracebacks, "_OWN", "")  # all files are unicomm's
    error = raised()
    assert tracebacks.without_own_frames(error.__traceback__) is error.__traceback__
    assert tracebacks.without_own_frames(None) is None
