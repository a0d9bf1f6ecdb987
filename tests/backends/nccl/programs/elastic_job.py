"""One rank of a job over the mock in which rank 1 is killed, and rank 3 then takes its place."""

import os
import signal

import torch
from torch._C._distributed_c10d import TCPStore

import unicomm
from tests.mocks.nccl.backend import make

KILLED, NEWCOMER = 1, 3


def summed(comm: unicomm.Communicator, value: float) -> float:
    x = torch.full((3,), value)
    comm.all_reduce(x, unicomm.ReduceOp.SUM, False).wait_blocking()
    return x[0].item()


def main() -> None:
    make("nccl-elastic-mock")
    me = int(os.environ["RANK"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    comm = unicomm.new_comm(
        "nccl-elastic-mock", torch.device("cpu"), name="elastic", timeout=120, enable_reconfigure=True
    )
    store.set(f"handle-{me}", comm.get_init_handle())

    def become(uuid: int, ranks: list[int]) -> None:
        comm.reconfigure(uuid, [store.get(f"handle-{r}").decode() for r in ranks])
        assert (comm.get_rank(), comm.get_size()) == (ranks.index(me), len(ranks))
        total = summed(comm, me)
        assert total == sum(ranks), total
        print("epoch", ranks, flush=True)

    if me != NEWCOMER:
        become(1, [0, 1, 2])
        if me == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for _ in range(1000):
                summed(comm, 1.0)
            raise AssertionError("the killed rank took part")
        except unicomm.CommError as error:
            print("caught", type(error).__name__, flush=True)
        become(2, [0, 2])
    become(3, [0, 2, 3])
    comm.finalize()
    print("done", flush=True)


if __name__ == "__main__":
    main()
