"""What torch asks a default group for that is bound to a device (init_process_group(device_id=...))."""

import torch
from torch.distributed import distributed_c10d as c10d

from unicomm.comms.process_group import UnicommProcessGroup
from unicomm.testing import run_ranks


def test_a_rank_that_a_new_group_leaves_out():
    """torch's new_group tells the group's backend there, which NCCL would need."""

    def program(comm):
        group = UnicommProcessGroup(comm)
        group.bound_device_id = comm.get_device()
        source = c10d._get_split_source(group)
        assert source is group
        if comm.get_rank() == 1:
            assert source.perform_nocolor_split(group.bound_device_id) is None
        else:  # nobody waits for those who were left out
            group.eager_connect_single_device(group.bound_device_id)
            assert comm.split([0]).get_size() == 1
        comm.barrier(False)

    run_ranks(program, 2)


def test_what_torch_calls_is_there():
    for name in ("perform_nocolor_split", "eager_connect_single_device", "_set_default_timeout"):
        assert name in vars(UnicommProcessGroup), name
    assert isinstance(UnicommProcessGroup.bound_device_id, property)
    assert torch.distributed.is_available()
