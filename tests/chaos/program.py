"""What the ranks of a chaos round do: random legal operations, the same on all ranks, with known results.

Everything follows from a seed, so that a round can be repeated. A rank tells the conductor each step that it
begins, and at the end what became of it: `right` (all results were), `wrong` (one was not, with what), or the
class of the error it got, with its culprits and when; then what is left in its process of the communicator.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import os
import random
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unicomm
from unicomm import Communicator, ReduceOp
from unicomm.backends.gloo import backend as gloo
from unicomm.flight_recorder.recording import writer
from unicomm.testing import conformance

SUM = ReduceOp.SUM
COUNTS = (1, 7, 300, 20_000, 60_000, 150_000)
RINGS = "rings"  # the folder, in the round's, of what the ranks recorded
CREATION = -2  # the step before there is a communicator
_NEWNS, _PRIVATE = 0x20000, 0x44000  # CLONE_NEWNS; MS_REC | MS_PRIVATE
_CLOSING = 20.0  # seconds for finalize
_GLOOS = ["pipe", "pipe", "anon_inode:[eventpoll]", "socket"]  # what one of its groups holds
_LETTING_GO = 90.0  # and for what Gloo holds while it tries to connect


@dataclass(frozen=True)
class Spec:
    """A rank of a round. `timeout` is that of operations, `store` the address of one, `link` the conductor's
    socket. `fate` is what happens to this rank of itself in step `at`: abort, leave, full, no descriptors,
    no memory. All ranks split in step `split_at`, if it is one. `interface`: of the network, for gloo.
    """

    seed: int
    rank: int
    size: int
    backend: str
    steps: int
    timeout: float
    store: str
    link: str
    prefix: str
    folder: str
    interface: str = ""
    split_at: int = -1
    fate: str = ""
    at: int = -1


class WrongDataError(Exception):
    pass


def value(rank: int, step: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32).fmod_(13).add_(rank * 3 + step % 5)


def total(ranks: list[int], step: int, count: int) -> torch.Tensor:
    return value(0, step, count).mul_(len(ranks)).add_(3 * sum(ranks))


class Steps:
    """The operations; `group` are the numbers of `comm`'s ranks in the round."""

    def __init__(self, comm: Communicator, group: list[int], me: int) -> None:
        self.comm, self.group, self.me = comm, group, me
        self.n = len(group)
        self.mine = group.index(me)

    def make(self, data: torch.Tensor, rng: random.Random) -> torch.Tensor:
        """Now and then in memory that others read directly; the choice may differ between ranks."""
        allocates = conformance.has_memory(self.comm)
        if rng.random() < 0.5 and allocates:
            return self.comm.mem_allocator.empty(data.shape).copy_(data)
        return data

    def run(self, step: int, rng: random.Random) -> None:
        kind = rng.choice(sorted(KINDS))
        count = rng.choice(COUNTS)
        root = rng.randrange(self.n)
        own = random.Random(rng.random() + (self.me if rng.random() < 0.3 else 0))
        KINDS[kind](self, step, count, root, own)

    def same(self, got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        if not torch.equal(got, expected):
            raise WrongDataError(f"{what} on {self.group}: {got[:8].tolist()}, not {expected[:8].tolist()}")

    def all_reduce(self, step: int, count: int, root: int, rng: random.Random) -> None:
        x = self.make(value(self.me, step, count), rng)
        self.comm.all_reduce(x, SUM, False)
        self.same(x, total(self.group, step, count), "all_reduce")

    def all_reduces_at_once(self, step: int, count: int, root: int, rng: random.Random) -> None:
        tensors = [self.make(value(self.me, step + i, count), rng) for i in range(4)]
        works = [self.comm.all_reduce(x, SUM, True) for x in tensors]
        for i, (work, x) in enumerate(zip(works, tensors, strict=True)):
            work.wait()
            self.same(x, total(self.group, step + i, count), "an asynchronous all_reduce")

    def broadcast(self, step: int, count: int, root: int, rng: random.Random) -> None:
        x = self.make(value(self.me, step, count), rng)
        self.comm.broadcast(x, root, False)
        self.same(x, value(self.group[root], step, count), "broadcast")

    def all_gather(self, step: int, count: int, root: int, rng: random.Random) -> None:
        count = -(-count // self.n)
        x = self.make(value(self.me, step, count), rng)
        out = torch.zeros(self.n * count)
        self.comm.all_gather_single(out, x, False)
        self.same(out, torch.cat([value(r, step, count) for r in self.group]), "all_gather")

    def reduce_scatter(self, step: int, count: int, root: int, rng: random.Random) -> None:
        count = -(-count // self.n)
        x = self.make(value(self.me, step, count * self.n), rng)
        out = torch.zeros(count)
        self.comm.reduce_scatter_single(out, x, SUM, False)
        expected = total(self.group, step, count * self.n)[self.mine * count : (self.mine + 1) * count]
        self.same(out, expected, "reduce_scatter")

    def all_to_all(self, step: int, count: int, root: int, rng: random.Random) -> None:
        count = -(-count // self.n)
        x = self.make(value(self.me, step, count * self.n), rng)
        out = torch.zeros(count * self.n)
        self.comm.all_to_all_single(out, x, False)
        part = slice(self.mine * count, (self.mine + 1) * count)
        expected = torch.cat([value(r, step, count * self.n)[part] for r in self.group])
        self.same(out, expected, "all_to_all")

    def gather(self, step: int, count: int, root: int, rng: random.Random) -> None:
        x = self.make(value(self.me, step, count), rng)
        outs = [torch.zeros(count) for _ in self.group] if self.mine == root else []
        self.comm.gather(outs, x, root, False)
        for r, out in zip(self.group, outs, strict=False):
            self.same(out, value(r, step, count), "gather")

    def ring(self, step: int, count: int, root: int, rng: random.Random) -> None:
        if self.n == 1:
            return
        to, back = (self.mine + 1) % self.n, (self.mine - 1) % self.n
        x, y = self.make(value(self.me, step, count), rng), torch.zeros(count)
        self.comm.batch_op_create().send(x, to).recv(y, back).issue(False)
        self.same(y, value(self.group[back], step, count), "a message")

    def relay(self, step: int, count: int, root: int, rng: random.Random) -> None:
        """One message after the other, from rank to rank."""
        x = self.make(value(self.group[0], step, count), rng) if self.mine == 0 else torch.zeros(count)
        if self.mine > 0:
            self.comm.recv(x, self.mine - 1, False)
        if self.mine < self.n - 1:
            self.comm.send(x, self.mine + 1, False)
        self.same(x, value(self.group[0], step, count), "a relayed message")

    def messages_at_once(self, step: int, count: int, root: int, rng: random.Random) -> None:
        """Asynchronous ones between pairs of ranks."""
        peer = self.mine ^ 1
        if peer >= self.n:
            return
        ins = [self.make(value(self.me, step + i, count), rng) for i in range(3)]
        outs = [torch.zeros(count) for _ in ins]
        works = []
        for x, y in zip(ins, outs, strict=True):
            for act, tensor in ((self.comm.send, x), (self.comm.recv, y))[:: 1 if self.mine < peer else -1]:
                works.append(act(tensor, peer, True))
        for work in works:
            work.wait()
        for i, y in enumerate(outs):
            self.same(y, value(self.group[peer], step + i, count), "an asynchronous message")

    def objects(self, step: int, count: int, root: int, rng: random.Random) -> None:
        everyone: list[Any] = [None] * self.n
        unicomm.objcol.all_gather_object(self.comm, everyone, {"rank": self.me, "step": step})
        if everyone != [{"rank": r, "step": step} for r in self.group]:
            raise WrongDataError(f"objects on {self.group}: {everyone}")

    def barrier(self, step: int, count: int, root: int, rng: random.Random) -> None:
        self.comm.barrier(False)


KINDS: dict[str, Callable[..., None]] = {
    name: f for name, f in vars(Steps).items() if name not in ("make", "run", "same") and name[0] != "_"
}


def split(comm: Communicator, spec: Spec, step: int, rng: random.Random) -> None:
    """A part of the ranks works on its own for a while."""
    cut = rng.randrange(1, spec.size)
    ranks = list(range(spec.size))
    rng.shuffle(ranks)
    parts = [sorted(ranks[:cut]), sorted(ranks[cut:])]
    seeds = [rng.random(), rng.random()]
    which = spec.rank in parts[1]
    part = parts[which]
    child = comm.split(part, f"part{step}")
    assert child is not None
    own = random.Random(seeds[which])
    try:
        for i in range(3):
            Steps(child, part, spec.rank).run(step + i, own)
    except unicomm.CommError as error:
        error.culprits = tuple(part[r] for r in error.culprits)  # as the round numbers them
        with contextlib.suppress(unicomm.CommError):
            child.finalize(_CLOSING)
        raise
    child.finalize()


def strike(spec: Spec) -> None:
    """What a rank does to itself."""
    if spec.fate == "full":
        # Too small for a ring, which is all that wants to be there. The mount is this process's alone.
        libc = ctypes.CDLL(None, use_errno=True)
        here = libc.unshare(_NEWNS) == 0 and libc.mount(b"none", b"/", None, _PRIVATE, None) == 0
        if not here or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64k") != 0:
            raise OSError(ctypes.get_errno(), "cannot mount a tmpfs")
        del os.environ["UNICOMM_TRACE_DIR"]
        tempfile.tempdir = spec.folder
    elif spec.fate == "no descriptors":
        used = len(os.listdir("/proc/self/fd"))
        limit(resource.RLIMIT_NOFILE, used + 1)
    elif spec.fate == "no memory":
        limit(resource.RLIMIT_FSIZE, 1 << 16)  # counts for memory files, too


def limit(what: int, value: int) -> None:
    resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


def work(spec: Spec, comm: Communicator, say: Callable[..., None]) -> None:
    rng = random.Random(spec.seed)
    comm.set_timeout(spec.timeout)
    for step in range(spec.steps):
        say("step", step)
        if step == spec.at and spec.fate == "leave":
            return
        if step == spec.at and spec.fate == "abort":
            # From another thread, some time into this step's operations.
            threading.Timer(random.Random(spec.seed).random() * 0.003, comm.abort).start()
        elif step == spec.at:
            strike(spec)
        if step % 7 == 3 or step == spec.split_at:
            split(comm, spec, step, rng)
        else:
            Steps(comm, list(range(spec.size)), spec.rank).run(step, rng)
    say("step", spec.steps)
    comm.barrier(
        False
    )  # else who has no more messages with a rank that is stopped would be right to end well


def connect(spec: Spec) -> Communicator:
    host, port = spec.store.rsplit(":", 1)
    store = dist.PrefixStore(spec.prefix, dist.TCPStore(host, int(port), is_master=False))
    if spec.at == CREATION:
        strike(spec)
    return unicomm.new_comm(
        spec.backend,
        torch.device("cpu"),
        name="chaos",
        store=store,
        rank=spec.rank,
        size=spec.size,
        timeout=60,
        hints={"interface": spec.interface} if spec.interface else None,
    )


def outcome(spec: Spec, say: Callable[..., None]) -> tuple[str, list[int], str]:
    """Plays the round. Nothing that it held may be left when it returns."""
    comm = None
    try:
        comm = connect(spec)
        work(spec, comm, say)
        comm.finalize()
    except WrongDataError as error:
        said: tuple[str, list[int], str] = ("wrong", [], str(error))
    except unicomm.CommError as error:
        said = (type(error).__name__, list(error.culprits), str(error))
    except Exception as error:
        said = (f"unexpected {type(error).__name__}", [], repr(error))
    else:
        return "right", [], ""
    say("end", *said)
    if comm is not None:
        comm.finalize(_CLOSING)
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
    # What Gloo forgets stays until the process ends; docs/design/failures.md.
    before = before + _GLOOS * len(gloo.forgotten)
    while True:
        gc.collect()
        now = list(held())
        for one in before:
            if one in now:
                now.remove(one)
        if not now or time.monotonic() > end:
            return now
        time.sleep(0.01)


def main(spec: Spec) -> int:
    """A rank, in a process of its own; returns its exit code."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGQUIT)  # the conductor asks where it hangs
    os.environ["UNICOMM_TRACE_DIR"] = spec.folder
    os.environ.update(RANK=str(spec.rank), WORLD_SIZE=str(spec.size), LOCAL_RANK=str(spec.rank))
    link = Client(spec.link, "AF_UNIX")
    link.send(("rank", spec.rank, os.getpid()))

    def say(*what: Any) -> None:
        link.send((time.monotonic(), *what))

    before = list(held())
    said = outcome(spec, say)
    say("end", *said)
    for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
        limit(what, resource.getrlimit(what)[1])
    # The ring goes with the process; who wants to know why a round was bad needs it.
    Path(spec.folder, RINGS, f"rank{spec.rank:05d}-{os.getpid()}.ucring").write_bytes(writer.ring_bytes())
    say("left", left(before), len(gloo.forgotten))
    atexit._run_exitfuncs()
    say("over")
    return 0
