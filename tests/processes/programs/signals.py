"""A rank whose signals come while it waits: signals.py KIND BACKEND

It waits in an operation of the kind for rank 1, which hears from the test when to take part, if it does.
SIGUSR1: its handler only says that it ran. SIGINT: Python's own handler, which raises KeyboardInterrupt.
"""

import signal
import sys

import torch

import unicomm
from tests.processes.programs.common import hear, reporting, say
from unicomm import symm

FOR_EVER = 1000.0
KIND, BACKEND = sys.argv[1:]

signal.signal(signal.SIGUSR1, lambda *_: say("handled"))
signal.signal(signal.SIGINT, signal.default_int_handler)
comm = unicomm.new_comm(BACKEND, torch.device("cpu"), name="main", timeout=FOR_EVER)
x = torch.ones(5)
window, works = None, []
if KIND == "wait_signal":
    symm.init(comm)
    window = comm.new_window()


def operate() -> None:
    me, peer = comm.get_rank(), 1 - comm.get_rank()
    if KIND == "all_reduce":  # the fast path's
        comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
    elif KIND == "message":
        comm.send(x, peer, False) if me else comm.recv(x, peer, False)
    elif KIND == "general":
        comm.all_reduce(x, unicomm.ReduceOp.SUM, False, timeout=FOR_EVER - 1)
    elif KIND == "batch":
        batch = comm.batch_op_create()
        batch.send(x.clone(), peer)
        batch.recv(x, peer)
        batch.issue(False)
    elif KIND == "async":
        works.append(comm.all_reduce(x, unicomm.ReduceOp.SUM, True))
        works[0].wait()
    elif KIND == "wait_signal":
        assert window is not None
        window.signal(peer, False) if me else window.wait_signal(peer, False)
    if KIND in ("message", "batch", "wait_signal"):  # rank 1 need not wait for rank 0 in these
        comm.barrier(False)


if comm.get_rank() == 1:
    hear()
say("calling")
try:
    with reporting():
        operate()
except KeyboardInterrupt:
    say("interrupted")
    with reporting():
        if works:
            works[0].wait()
        else:
            comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
say("end", values=x.tolist())
comm.finalize()
