"""Examples of the reference: testing."""

import torch

from unicomm import ReduceOp, new_comm
from unicomm.testing import conformance, drain, run_ranks


# %% testing.run_ranks
def program(comm):
    x = torch.tensor([float(comm.rank)])
    comm.all_reduce(x, ReduceOp.SUM)
    return x.item()


assert run_ranks(program, 4) == [6.0] * 4  # four ranks as threads

# %% testing.drain
with new_comm("shm", "cpu") as own:
    work = own.barrier(async_op=True)
    drain(own)
    assert work.is_completed()

# %% testing.conformance.check
run_ranks(lambda comm: conformance.check(comm, "broadcast", lambda case: case.count < 100), 2, backend="gloo")

# %% testing.conformance.check_rounding
run_ranks(lambda comm: conformance.check_rounding(comm, "reduce"), 2)

# %% testing.conformance.check_option
hints = conformance.OPTIONS["wire=int8"].hints
run_ranks(
    lambda comm: conformance.check_option(comm, "wire=int8", lambda case: case.count < 1000),
    2,
    backend="gloo",
    hints=hints,
)

# %% testing.conformance.ConformanceError
try:
    raise conformance.ConformanceError(
        "rank 0 of 2 on mine: broadcast float32 count=17: tensor[3] is 1, expected 2"
    )
except AssertionError as error:  # what a backend's tests show of a wrong result
    assert "expected 2" in str(error)
