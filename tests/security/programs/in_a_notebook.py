"""What a notebook does: ranks that live from call to call. Argument: a folder, as of waits.py."""

import sys
import time
from pathlib import Path

from unicomm.launch.notebook import launch, state


def join() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    state.sum = torch.ones(4)
    dist.all_reduce(state.sum)


folder = Path(sys.argv[1])
with launch(2) as ranks:
    ranks.run(join)
    for rank in range(2):
        (folder / f"up-{rank}").touch()
    end = time.monotonic() + 240
    while not (folder / "go").exists():
        assert time.monotonic() < end, "nobody has ended this notebook"
        time.sleep(0.02)
