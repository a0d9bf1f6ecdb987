"""Live ranks from a notebook, a script or a prompt: processes that stay alive from call to call.

    from unicomm.launch.notebook import launch, state

    with launch(4) as ranks:
        print(ranks.run(lambda: unicomm.new_comm("auto", torch.device("cpu")).get_rank()))

docs/notebook.md shows how to use it.

live_ranks.py      `launch` and `Ranks`
rank_call.py       one call on live ranks: deadlines, interrupts, results
rank_errors.py     `RankError` and `RankFailure`: how ranks failed
rank_worker.py     the process of a rank: runs calls; `state` lives there
worker_process.py  a rank's process as its parent sees it
channel.py         messages between parent and rank, and functions in them
output.py          output of several ranks on one screen
"""

from __future__ import annotations

from .live_ranks import Ranks, launch
from .rank_errors import RankError, RankFailure
from .rank_worker import state

__all__ = ["RankError", "RankFailure", "Ranks", "launch", "state"]
