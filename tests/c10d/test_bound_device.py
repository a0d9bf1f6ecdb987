"""A default group that is bound to a device, by init_process_group(device_id=)."""

import os
import sys

import torch
from torch.distributed import distributed_c10d as c10d

from tests.commands import run
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.testing import run_ranks

# The backend fake stands for GPUs that do not exist.
PRETEND = """
import torch, torch.distributed as dist
from unicomm.c10d import choice
class Gpus:
    current_device, device_count = (lambda: 0), (lambda: 8)
    is_initialized = lambda: False
choice.is_present = lambda kind: kind in ('cpu', 'cuda')
torch.get_device_module = lambda kind=None: Gpus
torch.accelerator.current_accelerator = lambda check_available=False: torch.device('cuda')
torch.accelerator.device_count, torch.accelerator.is_available = (lambda: 8), (lambda: True)
"""


def test_groups_made_later_are_on_that_device():
    """Even if neither LOCAL_RANK nor a current device names it."""
    code = PRETEND + (
        "one = torch.device('cuda', 1)\n"
        "for switched, backend in [(True, 'cpu:gloo,cuda:nccl'), (True, 'nccl'), (False, 'unicomm')]:\n"
        "    dist.config.use_torchcomms = switched\n"
        "    dist.init_process_group(\n"
        "        backend, store=dist.HashStore(), rank=0, world_size=1, device_id=one\n"
        "    )\n"
        "    assert dist.group.WORLD.bound_device_id == one\n"
        "    for make in (lambda: dist.new_group([0]), lambda: dist.split_group(split_ranks=[[0]])):\n"
        "        group = make()\n"
        "        assert group.bound_device_id == one\n"
        "        assert group.get_comm('cuda').get_device() == one\n"
        "    dist.destroy_process_group()\n"
    )
    env = {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1", "UNICOMM_BACKEND": "cuda:fake", "LOCAL_RANK": ""}
    done = run([sys.executable, "-c", code], within=120, env=os.environ | env)
    assert done.returncode == 0, done.stderr


def test_torchs_own_nccl_is_not_told_to_split_from_ours():
    """new_group(backend="nccl") passes the default group's backend to NCCL if that backend can be split."""

    def program(comm):
        group = UnicommProcessGroup(comm)
        group.bound_device_id = comm.get_device()
        assert c10d._get_split_source(group) is None
        assert group.supports_splitting  # for all other callers
        assert group.options == comm.get_options().hints

    run_ranks(program, 1)


def test_a_rank_that_a_new_group_leaves_out():
    """It waits for no other rank, although NCCL would need it."""

    def program(comm):
        group = UnicommProcessGroup(comm)
        group.bound_device_id = comm.get_device()
        if comm.get_rank() == 1:
            assert group.perform_nocolor_split(group.bound_device_id) is None
        else:  # the members do not wait for the ranks left out
            group.eager_connect_single_device(group.bound_device_id)
            assert comm.split([0]).get_size() == 1
        comm.barrier(False)

    run_ranks(program, 2)


def test_what_torch_calls_is_there():
    for name in ("perform_nocolor_split", "eager_connect_single_device", "_set_default_timeout"):
        assert name in vars(UnicommProcessGroup), name
    assert isinstance(UnicommProcessGroup.bound_device_id, property)
    assert torch.distributed.is_available()
