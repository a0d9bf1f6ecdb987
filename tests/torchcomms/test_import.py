"""`import torchcomms` finds unicomm if asked to, and the official package if there is one."""

import os
import sys
from pathlib import Path

import pytest

from tests.commands import clean_environment, run

ON = {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}
PROGRAMS = Path(__file__).parent / "programs"
pytestmark = pytest.mark.processes


def python(code, path=(), **env):
    """Runs a program in a new interpreter; `path` stands before all other folders of modules."""
    before = os.pathsep.join([*map(str, path), *filter(None, sys.path)])
    done = run([sys.executable, "-c", code], env=clean_environment() | {"PYTHONPATH": before} | env)
    assert done.returncode == 0, done.stderr
    return done


OURS = """
import torchcomms
import torchcomms.hooks, torchcomms.objcol, torchcomms.device_mesh
from torchcomms._comms import _BackendWrapper, new_comm
from torchcomms.hooks import FlightRecorderHook, NanCheckHook, clog
from torchcomms.hooks.clog import clog as same_clog
from torchcomms.hooks.fr import FlightRecorderHook as same_hook
from torchcomms.hooks.nan_check import NanCheckHook as same_check
import sys
import unicomm.torchcomms
import unicomm.torchcomms.hooks.fr
assert torchcomms is unicomm.torchcomms and torchcomms.__spec__.name == "unicomm.torchcomms"
assert torchcomms.objcol is unicomm.torchcomms.objcol and new_comm is unicomm.torchcomms.new_comm
assert same_hook is FlightRecorderHook is unicomm.torchcomms.hooks.fr.FlightRecorderHook
assert same_clog is clog and same_check is NanCheckHook
assert sys.modules["torchcomms.hooks.fr"] is sys.modules["unicomm.torchcomms.hooks.fr"]
try:
    import torchcomms.nothing
except ModuleNotFoundError as error:
    assert error.name == "torchcomms.nothing", error.name
else:
    raise AssertionError("found")
comm = torchcomms.new_comm("gloo", __import__("torch").device("cpu"), "x")
assert type(comm) is torchcomms.TorchComm
comm.finalize()
"""
ASKED = "import unicomm.torchcomms\nassert unicomm.torchcomms.install() == ''\n"


def test_with_the_switch():
    python("import torch\n" + OURS, **ON)


def test_with_the_switch_when_torchcomms_is_imported_first_after_unicomm():
    python("import unicomm\n" + "import torch\n" + OURS, **ON)


def test_after_the_call():
    python(ASKED + ASKED + OURS)


def test_without_being_asked_nothing_is_found():
    python(
        "import torch, unicomm, importlib.util\n"
        "assert importlib.util.find_spec('torchcomms') is None\n"
        "import unicomm.torchcomms\n"
        "assert importlib.util.find_spec('torchcomms') is None",
        TORCH_DISTRIBUTED_USE_TORCHCOMMS="0",
    )


def test_the_switch_loads_nothing_of_it_before_it_is_asked_for():
    python(
        "import torch, sys\nassert not [m for m in sys.modules if m.startswith('unicomm.torchcomms')]",
        **ON,
    )


@pytest.fixture
def official(tmp_path):
    """A folder with a package that looks like the official one."""
    package = tmp_path / "torchcomms"
    (package / "hooks").mkdir(parents=True)
    (package / "__init__.py").write_text("from torchcomms._comms import *\nwho = 'official'\n")
    (package / "_comms.py").write_text("class _BackendWrapper: ...\ndef new_comm(*a): return 'official'\n")
    (package / "hooks" / "__init__.py").write_text("class FlightRecorderHook: ...\n")
    return tmp_path


@pytest.mark.parametrize("first", ["import torch\n", ""])
def test_the_official_package_wins_with_the_switch(official, first):
    done = python(
        first + "import torchcomms, torchcomms.hooks\n"
        "assert torchcomms.who == torchcomms.new_comm() == 'official'\n"
        "import torch.distributed.distributed_c10d as c\n"
        "assert c.new_comm is torchcomms.new_comm",
        path=[official],
        **ON,
    )
    assert "official torchcomms is installed and is used" in done.stderr


def test_the_official_package_wins_after_the_call(official):
    python(
        "import unicomm.torchcomms\n"
        "assert 'official torchcomms is installed' in unicomm.torchcomms.install()\n"
        "import torchcomms, torchcomms.hooks\n"
        "assert torchcomms.who == 'official' and torchcomms is not unicomm.torchcomms\n"
        "assert torchcomms.hooks.FlightRecorderHook.__module__ == 'torchcomms.hooks'",
        path=[official],
    )


def test_the_placeholder_of_package_indexes_does_not_win(tmp_path):
    """torchcomms 0.0.1 on PyPI is a package that raises ImportError."""
    (tmp_path / "torchcomms").mkdir()
    (tmp_path / "torchcomms" / "__init__.py").write_text("raise ImportError('no')\n")
    python(ASKED + OURS, path=[tmp_path])


AT_RUN_TIME = """
import torch
import torch.distributed as dist
import torch.distributed.config as dist_config

def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    x = torch.ones(2)
    dist.all_reduce(x)
    name = type(group).__name__
    dist.destroy_process_group()
    return name

assert world() == "ProcessGroup"
dist_config.use_torchcomms = True  # as torchtitan does for --comm.mode=torchcomms
assert world() == "UnicommProcessGroup"
with dist_config.patch(use_torchcomms=False):
    assert world() == "ProcessGroup"
"""


def test_a_program_that_turns_torchcomms_on_at_run_time():
    python(ASKED + AT_RUN_TIME)


def test_torchs_own_test_helpers_find_it():
    pytest.importorskip("expecttest")  # torch's helpers import it
    python(
        ASKED + "import torch\n"
        "from torch.testing._internal import common_distributed as helpers\n"
        "assert helpers.TORCHCOMM_HAS_GLOO\n"
        "assert helpers.TORCHCOMM_HAS_NCCL == torch.cuda.is_available()"
    )


def test_torchs_own_tests_of_torchcomms_run():
    pytest.importorskip("expecttest")
    torch_distributed = pytest.importorskip("torch.testing._internal.common_distributed")
    if not hasattr(torch_distributed, "C10dTorchCommsTestBase"):
        pytest.skip("this torch has no base class for tests on torchcomms")
    before = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = run([sys.executable, PROGRAMS / "torch_helpers.py"], env=clean_environment() | before)
    assert done.returncode == 0, done.stderr
    assert "Ran 1 test" in done.stderr
    assert "skipped" not in done.stderr
