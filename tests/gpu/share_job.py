"""What several ranks do; as a program, one of two ranks that share the first GPU."""

import importlib.util
import sys

import torch
from torch._C._distributed_c10d import FileStore

import unicomm
from unicomm.comms.backend import HasOneSided
from unicomm.comms.errors import UnsupportedError
from unicomm.testing import conformance


def program(comm: unicomm.Communicator) -> bool:
    for operation in ("all_reduce", "all_gather_v", "reduce_scatter_single", "all_to_all_v_single", "batch"):
        assert conformance.check(comm, operation, lambda case: case.count in (0, 17)) > 3
    n, me = comm.get_size(), comm.get_rank()
    half = comm.split([r for r in range(n) if r % 2 == me % 2], "half")
    assert half is not None
    half.barrier(False)
    half.finalize()
    if isinstance(comm.unsafe_backend, HasOneSided):
        try:
            room = comm.mem_allocator.empty(n)
            room.zero_()
            comm.barrier(False)
            window = comm.new_window(room)
        except UnsupportedError as error:
            print(f"no windows: {error}")
            return True
        try:
            window.put(torch.full((1,), me + 1.0, device=comm.get_device()), (me + 1) % n, me, False)
        except UnsupportedError as error:
            print(f"no windows: {error}")
            window.free()
            return True
        window.signal((me + 1) % n, False)
        window.wait_signal((me - 1) % n, False).wait_blocking()
        assert room[(me - 1) % n].item() == (me - 1) % n + 1
        window.free()
    return True


def main(store: str, rank: int) -> None:
    device = torch.device("cuda", 0)
    with unicomm.new_comm(
        "nccl",
        device,
        rank=rank,
        size=2,
        store=FileStore(store, 2),
        name="shared",
        timeout=90,
        hints={"max_ctas": "2"},
    ) as comm:
        program(comm)
        if importlib.util.find_spec("cupy"):
            from tests.symm.device import device_bodies

            device_bodies.all_of_it(comm)  # by memory of processes that share the GPU


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
