"""The switch itself: what it sets for which torch, and when it stays out of the way."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed.distributed_c10d as c10d

from unicomm.launch import switch


def python(code, **env):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | env,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_off_it_imports_nothing():
    python(
        "import torch, sys\n"
        "assert 'unicomm.launch.switch' in sys.modules, 'torch did not call the entry point'\n"
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
        "assert c._TORCHCOMM_AVAILABLE and c._BackendWrapper.__name__ == 'UnicommProcessGroup'",
        TORCH_DISTRIBUTED_USE_TORCHCOMMS="1",
    )


def test_it_never_breaks_the_import_of_torch():
    done = python(
        "import unicomm.launch.switch as s\n"
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


@pytest.mark.parametrize("version", switch.NAMES)
def test_every_known_version_gets_its_names(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", f"{version[0]}.{version[1]}.0")
    monkeypatch.setattr(c10d, "_TORCHCOMM_AVAILABLE", False)
    for name in switch.NAMES[version]:
        monkeypatch.setattr(c10d, name, None, raising=False)
    assert switch.install() == ""
    assert all(getattr(c10d, name) is not None for name in switch.NAMES[version])


@pytest.mark.parametrize(
    ("choice", "name", "device", "chosen"),
    [
        ("", "gloo", "cpu", "auto"),
        ("", "nccl", "cuda", "nccl"),
        ("auto", "gloo", "cpu", "auto"),
        ("shm", "gloo", "cpu", "shm"),
        ("gloo", "mpi", "cpu", "gloo"),
    ],
)
def test_choice(monkeypatch, choice, name, device, chosen):
    monkeypatch.setenv(switch.CHOICE, choice)
    assert switch.chosen_backend(name, device) == chosen
