"""What builds upon torch.distributed, over the mock by the switch and over stock Gloo: the same numbers?

Prints what stood behind the first, and which consumers gave the same. One line of JSON a rank.
"""

import datetime
import json
import os
import runpy

from tests import ROOT
from tests.mocks.nccl.host_device import make_host_device

NAME = "nccl-host-device"
CHOSEN = ("ddp_buckets", "ddp_comm_hooks", "fsdp2", "hsdp", "dtensor", "pipeline_1f1b", "functional_autograd")


def batch_of_both_sides():
    """Each rank sends first: one after the other, they would wait for each other."""
    import torch
    import torch.distributed as dist

    peer, mine = 1 - dist.get_rank(), torch.full((1 << 18,), float(dist.get_rank()))
    into = torch.empty_like(mine)
    operations = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, into, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [into[:4]]


def main():
    import torch
    import torch.distributed as dist

    programs = ROOT / "tests/c10d/programs"
    consumers = runpy.run_path(str(programs / "consumers.py"), run_name="consumers")["CONSUMERS"]
    chosen = {name: consumers[name] for name in CHOSEN} | {"batch": batch_of_both_sides}
    found, groups = {}, []
    for switched in (False, True):  # torch's own Gloo first: at the end of Python its threads must have done
        dist.config.use_torchcomms = switched
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if switched else "gloo", timeout=datetime.timedelta(seconds=60)
        )
        group = dist.group.WORLD
        groups.append(group.get_comm("cpu").get_backend() if switched else type(group).__name__)
        found[switched] = {name: [t.detach().clone() for t in f()] for name, f in chosen.items()}
        dist.destroy_process_group()
    same = [
        name
        for name in chosen
        if len(found[True][name]) == len(found[False][name]) > 0
        and all(torch.allclose(a, b) for a, b in zip(found[True][name], found[False][name], strict=True))
    ]
    # In one piece: print writes the end of the line by itself, and another rank's line may come between.
    os.write(1, json.dumps({"groups": groups, "same": same}).encode() + b"\n")


if __name__ == "__main__":
    make_host_device(NAME)
    os.environ["UNICOMM_BACKEND"] = NAME
    main()
