"""Live ranks of a script, `python -c`, a prompt and a notebook's kernel, and their end with the parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes

WITHIN = 60.0  # seconds for what takes one: the machine may be busy

BOTH = """
from unicomm.launch.notebook import launch, state
ranks = launch(2, modules=(), grace=60)
offset = 10
def place():
    import os
    return helper(int(os.environ["RANK"]))

def helper(rank):
    return rank + offset

print("places", ranks.run(place))
print("lambda", ranks.run(lambda: place() * 2))
"""


def start(*command: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as in a terminal of its own
        **more,
    )


def check_both(out: str) -> None:
    assert "places [10, 11]" in out
    assert "lambda [20, 22]" in out


def test_script_without_a_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BOTH)
    with start(str(script)) as parent:
        check_both(parent.communicate(timeout=WITHIN)[0])
    assert parent.returncode == 0


def test_prompt() -> None:
    with start("-i", "-q", stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        check_both(parent.communicate(BOTH, timeout=WITHIN)[0])
    assert parent.returncode == 0


def test_notebook_kernel() -> None:
    """Runs cells in IPython's kernel: a function of another cell, output in the cell, an interrupt."""
    pytest.importorskip("ipykernel", reason="needs IPython's kernel: pip install ipykernel")
    from jupyter_client.manager import KernelManager

    manager = KernelManager()
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=WITHIN)

        def run(code: str, on_output: Any = lambda text: None) -> str:
            """Returns the output of a cell, with the text of its error at the end."""
            texts: list[str] = []

            def hear(message: dict[str, Any]) -> None:
                content = message["content"]
                if message["msg_type"] == "stream":
                    texts.append(content["text"])
                    on_output("".join(texts))
                elif message["msg_type"] == "error":
                    texts.append("\n".join(content["traceback"]))

            client.execute_interactive(code, output_hook=hear, timeout=WITHIN, allow_stdin=False)
            return "".join(texts)

        check_both(run(BOTH))
        said = run("def cell():\n    print('from', helper(0))\n    1 // offset_of_nobody\nranks.run(cell)")
        assert "[0] \x1b[0mfrom 10" in said or "[0] from 10" in said
        assert "NameError" in said
        assert "ranks 0-1 of 2 failed" in said or "ranks 0, 1 of 2 failed" in said
        assert "1 // offset_of_nobody" in said.split("Traceback (most recent call last)", 1)[1]
        before = run("print(ranks.pids)")

        wait = "import time\ndef wait():\n    print('waiting')\n    time.sleep(1000)\nranks.run(wait)"
        sent: list[int] = []

        def once(text: str) -> None:
            if text.count("waiting") == 2 and not sent:
                sent.append(1)
                manager.interrupt_kernel()

        assert "KeyboardInterrupt" in run(wait, once)
        assert run("import os; print(tuple(ranks.run(os.getpid)))") == before
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


WAITING = """
import ctypes, os, signal, subprocess, sys, time
from unicomm.launch.notebook import launch, state

def work():
    if os.environ["RANK"] == "0":
        child = subprocess.Popen(["sleep", "1000"])
        print("pids", os.getpid(), child.pid, flush=True)
        time.sleep(1000)
    print("pids", os.getpid(), flush=True)
    ctypes.PyDLL(None).sleep(1000)  # holds Python's lock

def show(rank, stream, line):
    print(line, flush=True)

ranks = launch(2, modules=(), output=show)
"""


def first_pids(parent: subprocess.Popen[str]) -> list[int]:
    """Returns the processes of both ranks, as soon as both run the call."""
    assert parent.stdout is not None
    pids: list[int] = []
    for line in parent.stdout:
        if line.startswith("pids"):
            pids += map(int, line.split()[1:])
        if len(pids) == 3:
            return pids
    raise AssertionError(f"it ended after {pids}")


def await_ends(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], WITHIN)[0], "a worker outlived its parent"
        os.close(descriptor)


def test_ranks_end_when_the_parent_is_killed() -> None:
    with start("-c", WAITING + "ranks.run(work)") as parent:
        ends = [os.pidfd_open(pid) for pid in first_pids(parent)]
        os.kill(parent.pid, signal.SIGKILL)
        await_ends(ends)


ENDS = {"raises": "raise SystemExit('no')", "ends at once": "sys.stdout.flush(); os._exit(1)"}


@pytest.mark.parametrize("how", ENDS)
def test_ranks_end_with_the_parent(how: str) -> None:
    code = """
def pids():
    state.child = subprocess.Popen(["sleep", "1000"])
    return os.getpid(), state.child.pid
print("pids", *ranks.run(pids)[0], ranks.pids[1], flush=True)
sys.stdin.readline()
"""
    with start("-c", WAITING + code + ENDS[how], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        ends = [os.pidfd_open(pid) for pid in first_pids(parent)]
        assert parent.stdin is not None
        parent.stdin.write("go on\n")
        parent.stdin.flush()
        await_ends(ends)


INTERRUPTED = """
import os, sys, time, unicomm
from unicomm.launch.notebook import launch
def show(rank, stream, line):
    print(line, flush=True)
def wait():
    print("waiting", flush=True)
    time.sleep(1000)
with launch(2, modules=(), grace=60, output=show) as ranks:
    before = ranks.pids
    try:
        ranks.run(wait)
    except KeyboardInterrupt:
        print("same", tuple(ranks.run(os.getpid)) == before, flush=True)
    if not (child := os.fork()):
        try:
            ranks.run(os.getpid)
        except unicomm.NotReadyError:
            sys.exit(7)  # in order: what runs at exit must leave the parent's ranks alone
        os._exit(1)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print("same", tuple(ranks.run(os.getpid)) == before, flush=True)
"""


def test_ranks_live_through_ctrl_c_and_a_fork() -> None:
    with start("-c", INTERRUPTED) as parent:
        assert parent.stdout is not None
        for _ in range(2):
            assert parent.stdout.readline() == "waiting\n"
        os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
        assert parent.stdout.read() == "same True\nchild 7\nsame True\n"
    assert parent.returncode == 0
