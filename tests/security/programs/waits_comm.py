"""A rank that creates a communicator, says so by a file, and ends when another file appears.

Arguments: the folder of both, the backend, and "reconfigurable" or nothing.
"""

import secrets
import sys
import time
from pathlib import Path

import torch

import unicomm

folder, backend = Path(sys.argv[1]), sys.argv[2]
comm = unicomm.new_comm(
    backend, torch.device("cpu"), name="main", timeout=60, enable_reconfigure="reconfigurable" in sys.argv
)
if "reconfigurable" in sys.argv:
    # The handles travel as a program likes; here through the folder.
    (folder / f"handle-{secrets.token_hex(4)}").write_text(comm.get_init_handle())
    end = time.monotonic() + 60
    while len(handles := sorted(folder.glob("handle-*"))) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.2)  # until the other one's is written
    comm.reconfigure(1, [path.read_text() for path in handles], timeout=60)
comm.all_reduce(torch.ones(4), unicomm.ReduceOp.SUM)
(folder / f"up-{secrets.token_hex(4)}").touch()
end = time.monotonic() + 100
while not (folder / "go").exists():
    assert time.monotonic() < end, "nobody has ended this rank"
    time.sleep(0.02)
comm.finalize()
