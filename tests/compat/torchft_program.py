"""A torchft replica group of one rank whose gradients travel by ProcessGroupTorchComms over unicomm.

    python torchft_program.py lighthouse
    python torchft_program.py replica NAME LIGHTHOUSE BACKEND STOP_FILE [DIE_AFTER]

`lighthouse` prints its address and runs until its input ends. `replica` trains until the step that the file
names, and prints a line of JSON for each step. After DIE_AFTER steps with another replica it kills itself in
the middle of the next: the replicas have agreed to take it together, and it has not sent its gradients. The
program has nothing of unicomm but `install()`.
"""

import hashlib
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

import unicomm.torchcomms

PATIENCE = timedelta(seconds=20)


def say(**what):
    print(json.dumps(what), flush=True)


def lighthouse():
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=200, quorum_tick_ms=50, heartbeat_timeout_ms=1500
    )
    say(event="lighthouse", address=server.address())
    sys.stdin.read()
    server.shutdown()


def batch(step, name):
    """Every replica has data of its own, so that weights only agree if the gradients are exchanged."""
    own = torch.Generator().manual_seed(1000 * step + int(name))
    x = torch.randn(16, 8, generator=own)
    return x, x.sum(1, keepdim=True)


def digest(model):
    data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(data).hexdigest()[:16]


def die(manager):
    manager.wait_quorum()
    os.kill(os.getpid(), signal.SIGKILL)


def replica(name, address, backend, stop_file, die_after="0"):
    assert not unicomm.torchcomms.install()
    import torchcomms
    import torchft
    from torchft.torchcomms import ProcessGroupTorchComms

    assert torchcomms is unicomm.torchcomms
    torch.manual_seed(int(name))  # a replica that joins takes the weights of the others
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    comm = torchcomms.new_comm(backend, torch.device("cpu"), "replicas", enable_reconfigure=True)
    manager = torchft.Manager(
        pg=ProcessGroupTorchComms(comm=comm, timeout=PATIENCE),
        min_replica_size=1,
        load_state_dict=lambda s: (model.load_state_dict(s["model"]), plain.load_state_dict(s["optim"])),
        state_dict=lambda: {"model": model.state_dict(), "optim": plain.state_dict()},
        replica_id=f"replica_{name}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=address,
        hostname="127.0.0.1",
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
    )
    wrapped = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, plain)
    torch.manual_seed(7)
    held_x = torch.randn(64, 8)
    held_y = held_x.sum(1, keepdim=True)
    together = 0
    say(event="ready", name=name, pid=os.getpid(), backend=comm.get_backend(), cls=type(comm).__name__)
    while not (Path(stop_file).exists() and manager.current_step() >= int(Path(stop_file).read_text())):
        optimizer.zero_grad()
        x, y = batch(manager.current_step(), name)
        guess = wrapped(x)
        if together == int(die_after) > 0:
            guess.register_hook(lambda _: die(manager))
        nn.functional.mse_loss(guess, y).backward()
        before = manager.current_step()
        failed = manager.errored()
        optimizer.step()
        committed = manager.current_step() > before
        together += committed and manager.num_participants() > 1
        with torch.no_grad():
            loss = float(nn.functional.mse_loss(model(held_x), held_y))
        say(
            event="step",
            name=name,
            step=manager.current_step(),
            committed=committed,
            replicas=manager.num_participants(),
            size=comm.get_size(),
            loss=loss,
            weights=digest(model),
            failure=failed and type(failed.original_exception).__name__,
        )
    manager.shutdown(wait=False)
    comm.finalize()


if __name__ == "__main__":
    {"lighthouse": lighthouse, "replica": replica}[sys.argv[1]](*sys.argv[2:])
