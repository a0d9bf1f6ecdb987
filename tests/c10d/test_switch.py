"""The switch: the names it sets for each torch version, and when it does nothing."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tests.commands import run
from tests.ports import free_port
from unicomm.c10d import choice, compat, store_deadline, switch


def python(code, **env):
    done = run([sys.executable, "-c", code], env=os.environ | env)
    assert done.returncode == 0, done.stderr
    return done


def forked(programs, folder, code, **env):
    """As `python` with the switch on, without a new start: for what happens after the import of torch."""
    program = folder / "program.py"
    program.write_text(code)
    env |= {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}
    codes, _, complaints = programs.run_each(program, (), [env], within=100)
    assert codes == [0], complaints


def test_off_it_imports_nothing():
    python(
        "import torch, sys\n"
        "assert 'unicomm.c10d.switch' in sys.modules, 'torch did not call the entry point'\n"
        "assert not [m for m in sys.modules if m.startswith('unicomm.comms')]",
        TORCH_DISTRIBUTED_USE_TORCHCOMMS="0",
    )


def test_off_means_off():
    python(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "assert type(dist.group.WORLD) is dist.ProcessGroup",
        TORCH_DISTRIBUTED_USE_TORCHCOMMS="0",
    )


@pytest.mark.parametrize(
    ("backend", "limited"), [("gloo", False), ("unicomm", True), ("cpu:unicomm,cuda:unicomm", True)]
)
def test_off_it_limits_the_wait_for_the_store_of_its_own_groups_only(monkeypatch, backend, limited):
    met = []
    first = store_deadline._first
    monkeypatch.setattr(store_deadline, "_for_all", False)
    monkeypatch.setattr(store_deadline, "_first", lambda *place: met.append(place) or first(*place))
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    dist.destroy_process_group()
    assert len(met) == limited


def test_on_means_on_without_a_launcher():
    """Rank and size are those of init_process_group, whatever the environment says."""
    python(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "assert type(dist.group.WORLD).__name__ == 'UnicommProcessGroup'\n"
        "assert dist.get_backend() == 'gloo' and dist.get_world_size() == 1",
        TORCH_DISTRIBUTED_USE_TORCHCOMMS="1",
        RANK="1",
        WORLD_SIZE="2",
    )


def test_on_it_is_installed():
    python(
        "import torch\n"
        "import torch.distributed.distributed_c10d as c\n"
        "import sys\n"
        "assert c._TORCHCOMM_AVAILABLE\n"
        "assert 'unicomm.c10d.process_group' not in sys.modules\n"
        "c.init_process_group('gloo', rank=0, world_size=1, store=torch.distributed.HashStore())\n"
        "assert type(c.GroupMember.WORLD).__name__ == 'UnicommProcessGroup'\n"
        "assert isinstance(c.GroupMember.WORLD, c._BackendWrapper)\n"
        "assert not isinstance(torch.distributed.HashStore(), c._BackendWrapper)",
        TORCH_DISTRIBUTED_USE_TORCHCOMMS="1",
    )


def test_one_line_of_one_rank_says_what_stands_behind_the_name():
    """torch itself warns once for each rank and device."""
    done = python(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        TORCH_DISTRIBUTED_USE_TORCHCOMMS="1",
    )
    assert "torch.distributed 'gloo' on cpu now is unicomm" in done.stderr
    assert "Using TorchComms backend" not in done.stderr


@pytest.mark.parametrize(
    "first",
    [
        "c10d.compat",
        "c10d.env_rendezvous",
        "c10d.process_group",
        "comms.backend",
        "comms.execution.member",
        "comms.membership.environment",
        "comms.operations.dtypes",
        "backends.registry",
    ],
)
def test_it_is_installed_whatever_module_imports_torch_first(first):
    done = python(
        f"import unicomm.{first}\n"
        "import torch.distributed.distributed_c10d as c\n"
        "assert c._TORCHCOMM_AVAILABLE",
        TORCH_DISTRIBUTED_USE_TORCHCOMMS="1",
    )
    assert "no effect" not in done.stderr


THIRD_PARTY = """
import torch, torch.distributed as dist

class Theirs(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.calls = []

    def allreduce(self, tensors, opts):
        self.calls.append(len(tensors))

    def getBackendName(self):
        return "theirs"

def extended(options, hints):
    assert options.global_ranks_in_group == [] and hints is None
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)

dist.Backend.register_backend("theirs", Theirs, devices=["cpu", "cuda"])
dist.Backend.register_backend("native", extended, extended_api=True, devices=["cpu"])

def world(backend):
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    return dist.group.WORLD
"""


@pytest.mark.parametrize(
    "program",
    [
        "w = world('theirs'); dist.all_reduce(torch.ones(1)); assert (type(w), w.calls) == (Theirs, [1])",
        "w = world('native'); dist.all_reduce(torch.ones(1)); assert type(w) is dist.ProcessGroup\n"
        "assert type(w._get_backend(torch.device('cpu'))) is dist.ProcessGroupGloo",
        "w = world('cpu:gloo,cuda:theirs'); x = torch.ones(1); dist.all_reduce(x)\n"
        "assert type(w).__name__ == 'MixedProcessGroup'\n"
        "assert type(w._get_backend(torch.device('cuda'))) is Theirs\n"
        "assert w.get_comm().get_backend() == 'shm'",
        "w = world('gloo'); assert type(w).__name__ == 'UnicommProcessGroup'",
        # As torch registers its own backends from 2.14 on.
        "extended.__module__ = 'torch.distributed.distributed_c10d'\n"
        "dist.Backend._plugins['GLOO'] = dist.Backend._BackendPlugin(extended, True)\n"
        "w = world('gloo'); assert type(w).__name__ == 'UnicommProcessGroup'",
        "world('gloo'); theirs = dist.new_group([0], backend='theirs')\n"
        "dist.all_reduce(torch.ones(1), group=theirs); assert (type(theirs), theirs.calls) == (Theirs, [1])",
        "world('theirs'); ours = dist.new_group([0], backend='gloo')\n"
        "dist.all_reduce(torch.ones(1), group=ours); assert type(ours).__name__ == 'UnicommProcessGroup'",
    ],
)
def test_third_parties_backends_stay_theirs(forked_programs, tmp_path, program):
    end = "\ndist.destroy_process_group()"
    forked(forked_programs, tmp_path, THIRD_PARTY + program + end)


def test_it_never_breaks_the_import_of_torch():
    done = python(
        "import unicomm.c10d.switch as s\n"
        "def broken(): raise AttributeError('oops')\n"
        "s.install = broken\n"
        "s.autoload()\n"
        "import torch",
        TORCH_DISTRIBUTED_USE_TORCHCOMMS="1",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert "has no effect: AttributeError: oops" in done.stderr


def test_an_unknown_torch_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert "2.99.0 is not known to this unicomm, which knows 2.11, 2.12, 2.13, 2.14, 2.15" in switch.install()
    assert c10d._TORCHCOMM_AVAILABLE is False


def test_the_official_package_wins(monkeypatch):
    monkeypatch.setattr(c10d, "_TORCHCOMM_AVAILABLE", True)
    assert "official torchcomms is installed" in switch.install()


@pytest.mark.parametrize("version", compat.SWITCH_NAMES)
def test_every_known_version_gets_its_names(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", f"{version[0]}.{version[1]}.0")
    monkeypatch.setattr(c10d, "_TORCHCOMM_AVAILABLE", False)
    for name in compat.SWITCH_NAMES[version]:
        monkeypatch.setattr(c10d, name, None, raising=False)
    assert switch.install() == ""
    assert all(getattr(c10d, name) is not None for name in compat.SWITCH_NAMES[version])


@pytest.mark.parametrize(
    ("variable", "name", "device", "chosen"),
    [
        ("", "gloo", "cpu", "auto"),
        ("", "nccl", "cuda", "nccl"),
        ("auto", "gloo", "cpu", "auto"),
        ("shm", "gloo", "cpu", "shm"),
        ("gloo", "mpi", "cpu", "gloo"),
        ("shm", "nccl", "cuda", "nccl"),
        ("nccl", "gloo", "cpu", "nccl"),
        ("fake", "nccl", "cuda", "fake"),
        ("cpu:shm,cuda:fake", "nccl", "cuda", "fake"),
        ("cpu:shm,cuda:fake", "gloo", "cpu", "shm"),
        ("cuda:fake", "gloo", "cpu", "auto"),
        ("", "gloo", "cuda", "nccl"),
        ("", "xccl", "xpu", "xccl"),
    ],
)
def test_choice(monkeypatch, variable, name, device, chosen):
    monkeypatch.setenv(choice.CHOICE, variable)
    assert choice.chosen_backend(name, device) == chosen


def test_on_amd_gpus_nccl_is_rccl(monkeypatch):
    monkeypatch.delenv(choice.CHOICE, raising=False)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert choice.chosen_backend("nccl", "cuda") == "rccl"


class Gpus:
    def __init__(self, current, count):
        self.current_device, self.device_count = (lambda: current), (lambda: count)


@pytest.mark.parametrize(
    ("given", "current", "count", "local", "number"),
    [
        (torch.device("cuda", 5), 2, 8, "3", 5),  # device_id= of init_process_group
        (torch.device("cuda"), 2, 8, "3", 2),  # torch.cuda.set_device
        (None, 0, 8, "3", 3),  # chosen later, or never
        (None, 0, 1, "3", 0),  # CUDA_VISIBLE_DEVICES leaves each rank one
        (None, 0, 8, "", 0),
        (torch.device("cpu"), 0, 2, "1", 1),
    ],
)
def test_a_rank_has_a_gpu_of_its_own(given, current, count, local, number):
    environ = {"LOCAL_RANK": local} if local else {}
    assert choice.device_of("cuda", given, environ, Gpus(current, count)) == torch.device("cuda", number)


def test_a_group_has_a_communicator_for_each_device_that_is_named(forked_programs, tmp_path):
    """The backend fake stands for a GPU that does not exist."""
    forked(
        forked_programs,
        tmp_path,
        "import torch, torch.distributed as dist\n"
        "from unicomm.c10d import choice\n"
        "choice.is_present = lambda kind: kind in ('cpu', 'cuda')\n"
        "choice.device_of = lambda kind, given, environ, module: torch.device(kind, 1)\n"
        "torch.get_device_module = lambda kind: None\n"
        "def devices_of(backend):\n"
        "    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)\n"
        "    group = dist.group.WORLD\n"
        "    comms = {d.type: group.get_comm(d) for d in group._device_types}\n"
        "    found = {kind: (str(c.get_device()), c.get_backend()) for kind, c in comms.items()}\n"
        "    if 'cpu' in found:\n"  # torch asks for the accelerator's, which is the CPU here
        "        assert dist.new_group([0])._device_types == group._device_types\n"
        "    dist.destroy_process_group()\n"
        "    return found\n"
        "both = {'cpu': ('cpu', 'shm'), 'cuda': ('cuda:1', 'fake')}\n"
        "assert devices_of('cpu:gloo,cuda:nccl') == both\n"
        "assert devices_of('gloo') == {'cpu': ('cpu', 'shm')}\n"
        "assert devices_of('nccl') == {'cuda': ('cuda:1', 'fake')}\n",
        UNICOMM_BACKEND="cuda:fake",
    )


OPTIONS = """
import pytest, torch
import torch.distributed as dist
from unicomm import InvalidArgumentError

def made(options, backend="unicomm"):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, pg_options=options)
    comm = dist.group.WORLD.get_comm()
    return comm, comm.get_options()

for options, hints, changes in (
    (None, {}, False),
    ({"checksum": True}, {"checksum": "true"}, False),
    ({"reduction": "reproducible", "enable_reconfigure": "true"}, {"reduction": "reproducible"}, True),
):
    comm, found = made(options)
    assert (dict(found.hints), found.enable_reconfigure) == (hints, changes), found
    child = dist.new_group([0], pg_options={"checksum": True}).get_comm()
    assert child.get_options().hints["checksum"] == "true"
    assert not child.get_options().enable_reconfigure
    dist.destroy_process_group()
for wrong in ({"chekcsum": True}, object(), "checksum"):
    with pytest.raises(InvalidArgumentError):
        made(wrong)
    dist.distributed_c10d._update_default_pg(None)
comm, found = made(dist.ProcessGroupGloo._Options(), "gloo")  # of torch's own Gloo, which this is not
assert not found.hints
dist.destroy_process_group()
"""


def test_options_of_a_group_are_those_of_its_communicator(forked_programs, tmp_path):
    forked(forked_programs, tmp_path, OPTIONS)
