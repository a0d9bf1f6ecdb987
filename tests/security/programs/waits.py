"""A rank that joins its group, says so by a file, and ends when another file appears.

Arguments: the folder of both. Rank r writes `r`, and waits for `go`.
"""

import os
import sys
import time
from pathlib import Path

import held_creation
import torch
import torch.distributed as dist

held_creation.install()
folder = Path(sys.argv[1])
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
(folder / os.environ["RANK"]).touch()
end = time.monotonic() + 240
while not (folder / "go").exists():
    assert time.monotonic() < end, "nobody has ended this rank"
    time.sleep(0.02)
dist.destroy_process_group()
