"""A communication failure in the middle of a backward is an exception: no signal, and `finally` blocks run.

torch's Reducer looks for tensors in the value of a future; one that had failed used to end the process.
"""

import subprocess
import sys
import time

import pytest
import torch

from tests.c10d.launch import PROGRAMS
from tests.commands import clean_environment
from tests.ports import free_port

CAUSE = {"lost": "PeerLostError", "late": "CommTimeoutError", "mismatch": "MismatchError"}
#: torch's Reducer passes on the text of an error, not its type.
TYPE_IS_LOST = ("ddp", "hook", "compiled")


def play(folder, kind, fault, ranks, backend):
    """Runs the program; returns the exit code of each rank, None for one that was still asleep."""
    env = clean_environment() | {
        "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1",
        "UNICOMM_BACKEND": backend,
        "UNICOMM_TRACE_DIR": str(folder),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
    }
    command = [sys.executable, str(PROGRAMS / "failing_step.py"), kind, fault, str(folder)]
    started = [
        subprocess.Popen(command, env=env | {"RANK": str(r)}, stderr=(folder / f"err{r}").open("w"))
        for r in range(ranks)
    ]
    end = time.monotonic() + 90
    try:
        for r, process in enumerate(started):
            if not (fault == "late" and r == 1):
                process.wait(max(0.0, end - time.monotonic()))
        return [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "fault", "ranks", "backend"),
    [
        *(("ddp", fault, ranks, "shm") for fault in CAUSE for ranks in (2, 4)),
        *(("ddp", fault, 2, "gloo") for fault in CAUSE),
        *((kind, fault, 2, "shm") for kind in ("fsdp", "compiled") for fault in CAUSE),
        ("hook", "lost", 2, "shm"),
        ("fsdp", "lost", 4, "gloo"),
        ("compiled", "mismatch", 4, "gloo"),
    ],
)
def test_it_is_an_exception(tmp_path, kind, fault, ranks, backend):
    codes = play(tmp_path, kind, fault, ranks, backend)
    said = {r: (tmp_path / f"err{r}").read_text()[-3000:] for r in range(ranks)}
    expected = {"lost": -9, "late": None, "mismatch": 3}
    assert codes == [expected[fault] if r == 1 else 3 for r in range(ranks)], said
    for r in range(ranks):
        if codes[r] != 3:
            continue
        name, _, text = (tmp_path / str(r)).read_text().partition(": ")
        # Rank 1 calls the other collective itself.
        assert name == ("RuntimeError" if kind in TYPE_IS_LOST and r != 1 else CAUSE[fault]), text
        assert CAUSE[fault] in f"{name}: {text}"
        assert "rank 1" in text
        assert torch.load(tmp_path / f"checkpoint-{r}") == {"step": 2}
