"""Ranks that train with checksums: checksums.py PLACE FAULT VICTIM [REDUCTION].

PLACE is a backend, or the hosts that the ranks play ("abb"), or "torch". In step `STEP`, a bit of rank
VICTIM's memory flips: of its gradient before the sum (FAULT "input"), of the sum when the transport has
written it ("result"), or of a message when it has arrived ("message").
"""

import inspect
import sys

import torch

import unicomm
from tests.processes.programs.common import describe, hear, say
from unicomm.comms.execution.composed import completion

PLACE, FAULT, VICTIM = sys.argv[1], sys.argv[2], int(sys.argv[3])
REDUCTION = sys.argv[4] if len(sys.argv) > 4 else "ordinary"
STEP, STEPS = 3, 5
SUM = unicomm.ReduceOp.SUM
step = 0


def flip(tensor: torch.Tensor) -> None:
    tensor.detach().reshape(-1).view(torch.uint8)[41] ^= 4


def run(group, call, run=completion.run):
    run(group, call)
    if FAULT == "result" and group.rank == VICTIM and step == STEP and call.name == "all_reduce":
        flip(call.outputs[0])


def exchange(group, messages, timeout, exchange=completion.exchange):
    exchange(group, messages, timeout)
    if FAULT == "message" and group.rank == VICTIM and step == STEP:
        for message in messages:
            if not message.send:
                flip(message.tensor)


completion.run, completion.exchange = run, exchange


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def train(comm) -> None:
    global step
    rank, size = comm.get_rank(), comm.get_size()
    weights = torch.zeros(5000)
    for step in range(1, STEPS + 1):
        generator = torch.Generator().manual_seed(100 * step + rank)
        gradient = torch.randn(5000, generator=generator) + weights / 10
        if FAULT == "input" and rank == VICTIM and step == STEP:
            flip(gradient)
        if step == 1:
            say("line", rank=rank, all_reduce=line() + 1)
        comm.all_reduce(gradient, SUM, async_op=False)
        weights -= gradient
        comm.all_gather_single(torch.empty(size), gradient[:1].clone(), async_op=False)
        following = torch.empty(20)
        if rank % 2 == 0 and rank + 1 < size:
            comm.send(weights[:20].clone(), rank + 1)
        elif rank % 2:
            comm.recv(following, rank - 1)
    say("weights", rank=rank, sum=weights.view(torch.int32).sum().item())


def train_by_torch() -> None:
    """With a gradient that is not contiguous."""
    global step
    import torch.distributed as dist

    dist.init_process_group("unicomm", pg_options={"checksum": True})
    for step in range(1, STEPS + 1):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        gradient = torch.randn(2, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
        if step == 1:
            say("line", all_reduce=line() + 1)
        dist.all_reduce(gradient)
        dist.all_reduce(gradient.permute(0, 2, 3, 1)[..., 0].clone(), op=dist.ReduceOp.AVG)
    say("weights", sum=0)
    dist.destroy_process_group()


try:
    if PLACE == "torch":
        train_by_torch()
    else:
        hints = {"checksum": True, "reduction": REDUCTION}
        hosts = set(PLACE) <= set("abc")
        with unicomm.new_comm(
            "auto" if hosts else PLACE,
            torch.device("cpu"),
            name="main",
            timeout=120,
            hints={**hints, "hosts": ",".join(PLACE)} if hosts else hints,
        ) as comm:
            train(comm)
except unicomm.SilentCorruptionError as error:
    say("error", step=step, **describe(error))
    if PLACE != "mpi":
        hear()  # so that no rank's end becomes another one's error
        raise
