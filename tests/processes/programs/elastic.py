"""A rank that does what the test tells it: elastic.py BACKEND TIMEOUT

Says its init handle, then takes JSON lines: {"do": "reconfigure", "uuid": ..., "handles": [...]},
{"do": "sum", "value": ..., "timeout": ...}, {"do": "finalize"}. TIMEOUT holds where an order brings none.
"""

import json
import os
import sys

import torch

import unicomm
from tests.processes.programs.common import hear, holdings, reporting, say, settled
from unicomm.testing import run_ranks


def held() -> dict[str, object]:
    """What a communicator could have left behind: threads by name, memory, sockets."""
    found = {key: value for key, value in holdings().items() if key != "tasks"}
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return found | {"sockets": sum(os.path.islink(x) and "socket:" in os.readlink(x) for x in links)}


torch.set_num_threads(1)
backend, timeout = sys.argv[1], float(sys.argv[2])
run_ranks(lambda comm: comm.barrier(True).wait(), 2, backend=backend)  # what a process starts once, for good
before = held()
comm = unicomm.new_comm(backend, "cpu", name="elastic", enable_reconfigure=True, timeout=timeout)
say("handle", handle=comm.get_init_handle())
while (order := json.loads(hear()))["do"] != "finalize":
    say("begins")
    with reporting():
        if order["do"] == "reconfigure":
            comm.reconfigure(order["uuid"], order["handles"])
            say("epoch", rank=comm.get_rank(), size=comm.get_size(), ranks=comm.get_ranks())
        elif order["do"] == "sum":
            x = torch.full((70001,), float(order["value"]))
            comm.all_reduce(x, unicomm.ReduceOp.SUM, False, timeout=order.get("timeout"))
            say("sum", value=x[-1].item(), same=bool((x == x[0]).all()))
comm.finalize()
say("finalized", before=before, after=settled(before, held))
