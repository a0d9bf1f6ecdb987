"""Two ranks that read each other's long messages where they lie, as far as the kernel permits it.

Arguments: "moved" and when a rank may not read any more ("never", "before" or "after" it has a communicator),
or "killed".
"""

import ctypes
import os
import platform
import struct
import sys

import torch

import unicomm
from tests.processes.programs.common import hear, reporting, say

MIB = 1 << 20
SIZES = (0, 1000, 1_700_000, 3 * MIB + 1, 20 * MIB)
PROCESS_VM_READV = {"x86_64": 310, "aarch64": 270}


def forbid_reading() -> None:
    """Has the kernel refuse process_vm_readv to this process from now on, as containers do."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    number, refuse = PROCESS_VM_READV[platform.machine()], 0x00050000 | 1  # SECCOMP_RET_ERRNO, EPERM
    # Load the number of the system call; if it is not this one, skip a step; refuse; allow.
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, refuse), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    filter_ = struct.pack("HL", len(steps), ctypes.addressof(code))
    assert prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert prctl(22, 2, ctypes.c_char_p(filter_), 0, 0) == 0, os.strerror(
        ctypes.get_errno()
    )  # PR_SET_SECCOMP


def pattern(size: int, salt: int) -> torch.Tensor:
    return ((torch.arange(size, dtype=torch.int32) + salt) % 251).to(torch.uint8)


def moved(comm: unicomm.Communicator) -> None:
    me, right = comm.get_rank(), True
    for at, size in enumerate(SIZES):
        mine, got = pattern(size, at + me), torch.full((size,), 255, dtype=torch.uint8)
        if me == 0:
            comm.send(mine, 1)
            comm.recv(got, 1)
        else:
            comm.recv(got, 0)
            comm.send(mine, 0)
        mine.zero_()  # it has been read when `send` returns
        right = right and torch.equal(got, pattern(size, at + 1 - me))
        comm.batch_op_create().send(got, 1 - me).recv(mine, 1 - me).issue()
        right = right and torch.equal(mine, pattern(size, at + me))
    say("moved", right=right, read=comm._engine.backend._group.direct_operations)


def killed(comm: unicomm.Communicator) -> None:
    size = 24 * MIB
    x = torch.empty(size, dtype=torch.uint8)
    y = torch.empty(size, dtype=torch.uint8)
    say("ready")
    hear()
    with reporting():
        for turn in range(1000):
            if comm.get_rank() == 0:
                x.fill_(turn % 251)
                comm.send(x, 1)
            else:
                comm.recv(y, 0)
                if turn == 1:
                    say("reading", read=comm._engine.backend._group.direct_operations)
                if not torch.equal(y, torch.full_like(y, turn % 251)):
                    say("wrong", turn=turn)
                    os._exit(3)


if sys.argv[2:] == ["before"] and os.environ["RANK"] == "1":
    forbid_reading()
with unicomm.new_comm("shm", torch.device("cpu"), name="main", timeout=60, hints={"one_copy": "on"}) as comm:
    if sys.argv[2:] == ["after"] and comm.get_rank() == 1:
        forbid_reading()
    globals()[sys.argv[1]](comm)
