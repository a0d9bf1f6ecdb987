"""Live ranks from a notebook, a script or a prompt: processes that stay alive from call to call.

    from unicomm.launch.notebook import launch, state

    with launch(4) as ranks:
        print(ranks.run(lambda: unicomm.new_comm("auto", torch.device("cpu")).get_rank()))

docs/notebook.md shows how to use it; the parts are in live/.
"""

from __future__ import annotations

from .live_ranks import Ranks, launch
from .rank_errors import RankError, RankFailure
from .rank_worker import state

__all__ = ["RankError", "RankFailure", "Ranks", "launch", "state"]
