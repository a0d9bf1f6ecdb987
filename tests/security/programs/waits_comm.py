"""A rank that creates a communicator, says so by a file, ends when another file appears, and says so too.

Arguments: the folder of both, the backend, and "reconfigurable" or nothing.
"""

import secrets
import sys
import time
from pathlib import Path

import held_creation
import torch

import unicomm

held_creation.install()
folder, backend = Path(sys.argv[1]), sys.argv[2]
comm = unicomm.new_comm(
    backend, torch.device("cpu"), name="main", timeout=60, enable_reconfigure="reconfigurable" in sys.argv
)
if "reconfigurable" in sys.argv:
    # The handles travel as a program likes; here through the folder.
    name = secrets.token_hex(4)
    (folder / f"new-{name}").write_text(comm.get_init_handle())
    (folder / f"new-{name}").rename(folder / f"handle-{name}")
    end = time.monotonic() + 60
    while len(handles := sorted(folder.glob("handle-*"))) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    comm.reconfigure(1, [path.read_text() for path in handles], timeout=60)
comm.all_reduce(torch.ones(4), unicomm.ReduceOp.SUM)
(folder / f"up-{secrets.token_hex(4)}").touch()
end = time.monotonic() + 240
while not (folder / "go").exists():
    assert time.monotonic() < end, "nobody has ended this rank"
    time.sleep(0.02)
comm.finalize()
(folder / f"down-{secrets.token_hex(4)}").touch()
