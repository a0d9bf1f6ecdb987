"""A rank on a host that has no IPv4: ipv6.py gloo|auto|given|init_process_group|reconfigure."""

import json
import os
import sys

import torch
import torch.distributed as dist

import unicomm

WAY = sys.argv[1]
RANK = int(os.environ["RANK"])
HOST, PORT = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
LIMIT = 60.0

x = torch.full((2,), RANK + 1.0)
if WAY == "init_process_group":
    dist.init_process_group("gloo")
    dist.all_reduce(x)
    print(json.dumps(x.tolist()), flush=True)
    dist.destroy_process_group()
    sys.exit()

if WAY in ("given", "reconfigure"):
    store = dist.TCPStore(HOST, PORT, None, RANK == 0)
if WAY == "given":
    comm = unicomm.new_comm("auto", "cpu", timeout=LIMIT, store=store, rank=RANK, size=2)
elif WAY == "reconfigure":
    comm = unicomm.new_comm("gloo", "cpu", timeout=LIMIT, enable_reconfigure=True)
    store.set(f"handle{RANK}", comm.get_init_handle())
    comm.reconfigure(1, [store.get(f"handle{rank}").decode() for rank in (0, 1)])
else:
    comm = unicomm.new_comm(WAY, "cpu", timeout=LIMIT)
comm.all_reduce(x, unicomm.ReduceOp.SUM, async_op=False)
print(json.dumps(x.tolist()), flush=True)
comm.barrier(async_op=False)  # rank 0 holds the store
comm.finalize()
