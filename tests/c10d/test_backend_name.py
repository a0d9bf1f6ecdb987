"""`init_process_group("unicomm")` without the switch, alone and beside torch's own backends."""

from collections import Counter
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from unicomm import InvalidArgumentError, UnsupportedError
from unicomm.c10d import group_names
from unicomm.c10d.calls.table import all_names
from unicomm.c10d.mixed_group import MixedProcessGroup, torch_group
from unicomm.c10d.process_group import UnicommProcessGroup


@pytest.fixture
def group():
    """Makes the default group of one rank; destroys it afterwards."""

    def make(backend, **more):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **more)
        return dist.group.WORLD

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def test_it_is_known_to_torch(group):
    world = group("unicomm")
    assert type(world) is UnicommProcessGroup
    assert dist.get_backend() == "unicomm"
    assert (world.get_comm().get_name(), world.group_name) == ("default", "0")
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [1.0] * 3


def test_groups_of_the_same_ranks_have_different_names(group, monkeypatch):
    monkeypatch.setattr(group_names, "_made", Counter())
    world = group("unicomm")
    made = [dist.new_group([0]), dist.new_group([0]), dist.new_group([0], group_desc="tp")]
    made += [world.splitGroup([0]), world.splitGroup([0], group_name="mine", group_desc="tp")]
    names = [one.get_comm().get_name() for one in made]
    assert names == ["ranks 0", "ranks 0 #2", "tp (ranks 0)", "ranks 0 #3", "tp (ranks 0) #2"]
    assert made[-1].group_name == "mine"


def test_hints_go_by_pg_options(group, raised):
    assert "slot_bytes" in str(raised(group, "unicomm", pg_options={"slot_bites": "1"}))
    assert type(raised(group, "unicomm", pg_options=object())) is InvalidArgumentError
    world = group("unicomm", pg_options={"slot_bytes": "65536"})
    assert world.get_comm().get_options().hints == {"slot_bytes": "65536"}


@pytest.mark.parametrize("backend", ["cpu:unicomm,cuda:gloo", "cuda:gloo,cpu:unicomm"])
def test_beside_torchs_own_backends(group, backend):
    """In either order of creation. Tensors go to the backend of their device."""
    world = group(backend)
    assert type(world) is MixedProcessGroup
    assert world._get_backend(torch.device("cpu")) is world
    other = world._get_backend(torch.device("cuda"))
    assert isinstance(other, dist.ProcessGroupGloo)
    assert {d.type for d in world._device_types} == {"cpu", "cuda"}
    x = torch.ones(3)
    dist.all_reduce(x)
    assert world.get_comm("cpu").barrier(False).seq == 2
    part = dist.new_group([0])
    assert isinstance(part._get_backend(torch.device("cuda")), dist.ProcessGroupGloo)
    dist.destroy_process_group(part)


def test_tensors_of_other_devices_are_passed_on():
    """torch's backend gets the same arguments from every method that moves data."""
    from unicomm import new_comm

    called = []

    class Mock:
        def __getattr__(self, name):
            return lambda *arguments: called.append((name, arguments)) or "work"

    with new_comm("fake", torch.device("cpu"), rank=0, size=2) as comm:
        world = MixedProcessGroup(comm, others={"meta": Mock()})
        x = torch.empty(4, device="meta")
        calls = {
            "allreduce": ([x], dist.AllreduceOptions()),
            "broadcast": ([x], BroadcastOptions()),
            "allgather": ([[x, x]], [x]),
            "all_gather_single": (x, x, AllgatherOptions()),
            "reduce_scatter": ([x], [[x, x]], ReduceScatterOptions()),
            "all_to_all_single": (x, x, [], [], AllToAllOptions()),
            "gather": ([], [x], GatherOptions()),
            "scatter": ([x], [], ScatterOptions()),
            "send": ([x], 1, 0),
            "recv_anysource": ([x], 0),
        }
        for name, arguments in calls.items():
            assert getattr(world, name)(*arguments) == "work"
        assert [name for name, _ in called] == list(calls)
        assert [arguments for _, arguments in called] == list(calls.values())
        world.allreduce([torch.ones(2)], dist.AllreduceOptions()).wait()
        assert len(called) == len(calls)


def test_what_torchs_backends_lack_goes_through_a_group_of_torch():
    """As `all_gather_single`, which `dist.all_gather_into_tensor` calls, and FSDP2 with it."""
    from unicomm import new_comm

    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
    group = torch_group("cpu", gloo)
    assert not hasattr(gloo, "all_gather_single")
    assert [name for name in all_names() if not hasattr(group, name) and not hasattr(gloo, name)] == []
    out, x = torch.zeros(3), torch.ones(3)
    group.all_gather_single(out, x, AllgatherOptions()).wait()
    assert out.tolist() == [1, 1, 1]
    with new_comm("fake", torch.device("cpu"), rank=0, size=1) as comm:
        world = MixedProcessGroup(comm, others={"cpu": gloo})
        world.all_gather_single(out.zero_(), x, AllgatherOptions()).wait()
        world.allgather([[out.zero_()]], [x]).wait()
        assert out.tolist() == [1, 1, 1]


@pytest.mark.parametrize("told", [False, True])
def test_a_batch_is_one_for_torchs_backend(monkeypatch, told):
    """If messages went one by one, two ranks that both send first would wait for each other on NCCL."""
    from unicomm import new_comm

    called = []

    class Mock:
        supports_coalescing = True

        def __getattr__(self, name):
            return lambda *arguments: called.append(name) or name

    with new_comm("fake", torch.device("cpu"), rank=0, size=2) as comm:
        world = MixedProcessGroup(comm, others={"meta": Mock()})
        x = torch.empty(4, device="meta")
        calls = (lambda *_, **__: world.send([x], 1, 0)), (lambda *_, **__: world.recv([x], 1, 0))
        batch = [SimpleNamespace(op=f, tensor=x, group=world, tag=0, group_peer=1) for f in calls]
        monkeypatch.setattr(dist.distributed_c10d, "_check_p2p_op_list", lambda operations: None)
        for _ in range(2):
            if told:
                with dist.distributed_c10d._coalescing_manager(world, x.device, async_ops=True) as manager:
                    for call in calls:
                        call()
                works = manager.works
            else:
                works = dist.batch_isend_irecv(batch)
            assert works == ["_end_coalescing"]
        assert called == ["_start_coalescing", "send", "recv", "_end_coalescing"] * 2
        world.send([x], 1, 0)
        assert called[8:] == ["send"]


def test_what_cannot_be_combined_says_so(group, raised):
    error = raised(group, "cpu:unicomm,cuda:mpi")
    if type(error) is RuntimeError:  # torch 2.14 checks it itself
        assert "MPI" in str(error)
        return
    assert type(error) is UnsupportedError, error
    assert "'mpi' cannot be combined" in str(error)
