"""A rank that does what the test tells it: elastic.py BACKEND TIMEOUT

Says its init handle, then takes JSON lines: {"do": "reconfigure", "uuid": ..., "handles": [...]},
{"do": "sum", "value": ...}, {"do": "finalize"}.
"""

import json
import sys

import torch
from common import hear, holdings, reporting, say, settled

import unicomm

torch.set_num_threads(1)
backend, timeout = sys.argv[1], float(sys.argv[2])
before = holdings()
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
            comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
            say("sum", value=x[-1].item(), same=bool((x == x[0]).all()))
comm.finalize()
say("finalized", before=before, after=settled(before))
