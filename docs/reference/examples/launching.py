"""Examples of the reference: live ranks."""

from unicomm.launch import notebook


# %% launch.notebook.launch, launch.notebook.state, launch.notebook.RankError, launch.notebook.RankFailure
# %% launch.notebook.Ranks, launch.notebook.Ranks.run
# %% launch.notebook.Ranks.restart, launch.notebook.Ranks.close
def total():
    import torch

    import unicomm

    comm = notebook.state.comm = unicomm.new_comm("auto", "cpu")
    x = torch.tensor([comm.rank + 1.0])
    comm.all_reduce(x, unicomm.ReduceOp.SUM)
    return x.item()


def fail():
    raise ValueError("bad batch")


ranks = notebook.launch(2)
assert ranks.run(total) == [3.0, 3.0]
assert ranks.run(lambda: notebook.state.comm.size) == [2, 2]  # what a call left there
try:
    ranks.run(fail, ranks=[1])
except notebook.RankError as error:
    assert isinstance(error.failures[1], notebook.RankFailure)
    assert "bad batch" in error.failures[1].summary
ranks.restart()  # new processes, which import changed modules and know nothing of the old calls
assert ranks.run(total) == [3.0, 3.0]
ranks.close()
