"""A rank of a chaos round, in a process of its own: plays the round's scene and tells what became of it.

All ranks do the same random legal things, with known results. Everything follows from a seed, so that a
round can be repeated. A rank tells the conductor each step that it begins, and at the end what became of it:
`right` (all results were), `wrong` (one was not, with what), or the class of the error it got, with its
culprits and when; then what is left in its process of the communicator.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import resource
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

import unicomm
from tests.chaos import creation, operations, reconfigure, symmetric, training
from tests.chaos.spec import LIMITS, RINGS, Say, Spec, WrongDataError, limit, open_store
from unicomm.backends.gloo import backend as gloo
from unicomm.flight_recorder.recording import writer

SCENES = {
    "operations": operations.play,
    "creation": creation.play,
    "reconfigure": reconfigure.play,
    "ddp": training.play,
    "fsdp2": training.play,
    "symmetric": symmetric.play,
}
_GLOOS = ["pipe", "pipe", "anon_inode:[eventpoll]", "socket"]  # what one of its groups holds
_LETTING_GO = 90.0  # and for what Gloo holds while it tries to connect


def outcome(spec: Spec, say: Say) -> tuple[str, list[int], str]:
    """Plays the round. Nothing that it held may be left when it returns."""
    with contextlib.ExitStack() as closing:
        try:
            SCENES[spec.scene](spec, say, closing)
        except WrongDataError as error:
            said: tuple[str, list[int], str] = ("wrong", [], str(error))
        except unicomm.CommError as error:
            said = (type(error).__name__, list(error.culprits), str(error))
        except Exception as error:
            said = (f"unexpected {type(error).__name__}", [], repr(error))
        else:
            said = ("right", [], "")
        say("end", *said)
    return said


def held() -> Iterator[str]:
    """What of this process a communicator may hold, in words: descriptors, threads, segments."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if "unicomm-tensors" not in target and not target.endswith((".ucring", ".stacks", "/fd")):
                yield target.split(":")[0] if target.startswith(("socket", "pipe")) else target
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:unicomm " in line:
            yield "a mapped segment"


def left(before: list[str]) -> list[str]:
    """What is held that was not. Threads that are about to end, and what they hold, get a while."""
    end = time.monotonic() + _LETTING_GO
    pause = 0.01
    gc.collect()
    # What Gloo forgets stays until the process ends; docs/design/failures.md.
    before = before + _GLOOS * len(gloo.forgotten)
    while True:
        now = list(held())
        for one in before:
            if one in now:
                now.remove(one)
        if not now or time.monotonic() > end:
            return now
        time.sleep(pause := min(2 * pause, 1.0))
        gc.collect()  # takes a tenth of a second of a core


def _initialize_mpi(spec: Spec) -> None:
    """Has unicomm initialise MPI: what the library itself holds, it holds until the process ends."""
    comm = unicomm.new_comm(
        "mpi", "cpu", name="first", store=open_store(spec), rank=spec.rank, size=spec.size, timeout=60
    )
    comm.barrier(False)
    comm.finalize()


def main(spec: Spec) -> int:
    """Returns the exit code."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGQUIT)  # the conductor asks where it hangs
    os.environ["UNICOMM_TRACE_DIR"] = spec.folder
    os.environ.update(RANK=str(spec.rank), WORLD_SIZE=str(spec.size), LOCAL_RANK=str(spec.rank))
    link = Client(spec.link, "AF_UNIX")
    link.send(("rank", spec.rank, os.getpid()))

    def say(*what: Any) -> None:
        link.send((time.monotonic(), *what))

    if spec.backend == "mpi":
        _initialize_mpi(spec)
    if spec.scene == "creation" and spec.rank == 0:
        # libuv, on which torch's store runs, keeps a pipe for its signals until the process ends.
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = list(held())
    if spec.scene in ("ddp", "fsdp2"):
        # The job's store; after a backward of DDP that failed torch keeps its futures, and by them the Gloo.
        before += ["socket", *(_GLOOS if spec.scene == "ddp" else ())]
    outcome(spec, say)
    for what in LIMITS:
        limit(what, resource.getrlimit(what)[1])
    # The ring goes with the process; who wants to know why a round was bad needs it.
    Path(spec.folder, RINGS, f"rank{spec.rank:05d}-{os.getpid()}.ucring").write_bytes(writer.ring_bytes())
    say("left", left(before), len(gloo.forgotten))
    atexit._run_exitfuncs()
    say("over")
    return 0
