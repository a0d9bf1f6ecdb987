"""A rank that waits in a collective until another one is gone, twice; says what each time it heard."""

import json
import sys

import torch

import unicomm


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


torch.set_num_threads(1)
comm = unicomm.new_comm("auto", "cpu", timeout=60)
rest = comm.split([0, 1, 2, 3] if comm.get_rank() < 4 else [], "rest")
comm.barrier(False)
say("ready")
for each in (comm, rest):
    sys.stdin.readline()  # the victims hear nothing
    say("calling")
    try:
        each.all_reduce(torch.ones(4), unicomm.ReduceOp.SUM, False)
    except unicomm.CommError as error:
        say([type(error).__name__, error.culprits, error.message])
