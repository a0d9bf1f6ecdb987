"""What a rank of a chaos round is told, what it does to itself, and how it connects."""

from __future__ import annotations

import ctypes
import os
import resource
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore

import unicomm
from unicomm import Communicator

RINGS = "rings"  # the folder, in the round's, of what the ranks recorded
CREATION = -2  # the step before there is a communicator
SPLITS = (3, 10)  # the steps in which all ranks split
CLOSING = 20.0  # seconds for finalize
LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS)
_NEWNS, _PRIVATE = 0x20000, 0x44000  # CLONE_NEWNS; MS_REC | MS_PRIVATE
_ROOM = 1 << 20  # bytes of address space that are left

Say = Callable[..., None]


@dataclass(frozen=True)
class Spec:
    """A rank of a round. `timeout` is that of operations, `store` the address of one, `link` the conductor's
    socket. `fate` is what this rank does to itself in step `at`: see `rounds.OWN`. All ranks split in step
    `split_at`, if it is one. `victims`: whom the fault hits; `leads`: whether it is the first in
    lists of handles; None: now and then. `interface`: of the network, for gloo. `between`: what `auto` takes
    between hosts.
    """

    seed: int
    rank: int
    size: int
    backend: str
    scene: str
    steps: int
    timeout: float
    store: str
    link: str
    prefix: str
    folder: str
    victims: tuple[int, ...] = ()
    leads: bool | None = None
    interface: str = ""
    between: str = ""
    split_at: int = -1
    fate: str = ""
    at: int = -1

    @property
    def hints(self) -> dict[str, str] | None:
        named = {"interface": self.interface, "between": self.between}
        return {name: value for name, value in named.items() if value} or None


class WrongDataError(Exception):
    pass


def strike(spec: Spec) -> None:
    """What a rank does to itself."""
    if spec.fate == "full":
        # Too small for a ring, which is all that wants to be there.
        _own_shm("64k")
        del os.environ["UNICOMM_TRACE_DIR"]
        tempfile.tempdir = spec.folder
    elif spec.fate == "filled":
        _fill(Path("/dev/shm/filled"))
    elif spec.fate == "no descriptors":
        used = len(os.listdir("/proc/self/fd"))
        limit(resource.RLIMIT_NOFILE, used + 1)
    elif spec.fate == "no memory":
        limit(resource.RLIMIT_FSIZE, 1 << 16)  # counts for memory files, too
    elif spec.fate == "no address space":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit(resource.RLIMIT_AS, pages * resource.getpagesize() + _ROOM)


def prepare(spec: Spec) -> None:
    """Before there is a communicator: what strikes then, and what a later strike needs."""
    if spec.fate == "filled":
        _own_shm("64m")
        del os.environ["UNICOMM_TRACE_DIR"]
    elif spec.at == CREATION:
        strike(spec)


def _own_shm(size: str) -> None:
    """Mounts a /dev/shm of this size, for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    here = libc.unshare(_NEWNS) == 0 and libc.mount(b"none", b"/", None, _PRIVATE, None) == 0
    if not here or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={size}".encode()) != 0:
        raise OSError(ctypes.get_errno(), "cannot mount a tmpfs")


def _fill(path: Path) -> None:
    """Writes until there is no room."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


def limit(what: int, value: int) -> None:
    resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


def open_store(spec: Spec) -> Store:
    host, port = spec.store.rsplit(":", 1)
    return PrefixStore(spec.prefix, TCPStore(host, int(port), is_master=False))


def connect(spec: Spec, **options: Any) -> Communicator:
    """A communicator of all ranks, which met in the conductor's store."""
    store = open_store(spec)
    prepare(spec)
    return unicomm.new_comm(
        spec.backend,
        torch.device("cpu"),
        name="chaos",
        store=store,
        rank=spec.rank,
        size=spec.size,
        timeout=60,
        hints=spec.hints,
        **options,
    )
