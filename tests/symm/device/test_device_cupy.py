"""How kernels are launched by cupy: over a mock of it that has its rules, and what cupy itself says of our
arguments where it is installed, which needs no GPU."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from unicomm.comms.errors import UnsupportedError
from unicomm.comms.memory.device_kernels import (
    FIELDS,
    INDEX,
    KERNELS,
    OPTIONS,
    CupyLauncher,
    by_value,
    source,
)

_local = threading.local()


class Kernel:
    def __init__(self, module, name):
        self._module, self._name = module, name

    @property
    def num_regs(self):
        assert not self._module.cupy.capturing, "a module that is loaded now ends the capture"
        self._module.loaded.add((getattr(_local, "device", 0), self._name))
        return 32

    kernel = num_regs

    def __call__(self, grid, block, args):
        assert type(grid) is type(block) is type(args) is tuple
        device = getattr(_local, "device", 0)
        if (device, self._name) not in self._module.loaded:
            assert self.num_regs
        (given,) = args
        if isinstance(given, np.ndarray) and given.size != 1:
            raise TypeError("Only numpy.ndarrays of size one can be passed by value.")
        words = np.frombuffer(given.tobytes(), np.int64)
        self._module.cupy.launched.append((device, _local.stream, self._name, grid, block, words))


class Cupy:
    """As much of it as is used; `new`: as since version 14."""

    def __init__(self, new=True, broken=None):
        self.launched, self.modules, self.capturing, self._broken = [], [], False, broken
        stream = SimpleNamespace(from_external=self._from_external) if new else SimpleNamespace()
        self.cuda = SimpleNamespace(Device=self._device, Stream=stream)
        if not new:
            self.cuda.ExternalStream = lambda pointer, device_id: self._use(pointer)

    def RawModule(self, *, code, options):  # noqa: N802
        assert code == source()
        assert type(options) is tuple
        made = SimpleNamespace(cupy=self, loaded=set())
        made.get_function = lambda name: Kernel(made, name)
        self.modules.append(made)
        if self._broken:
            raise self._broken
        return made

    @contextlib.contextmanager
    def _device(self, number):
        before, _local.device = getattr(_local, "device", 0), number
        try:
            yield
        finally:
            _local.device = before

    def _from_external(self, other):
        version, pointer = other.__cuda_stream__()
        assert version == 0
        return self._use(pointer)

    def _use(self, pointer):
        class Used:
            def __enter__(self):
                self.before, _local.stream = getattr(_local, "stream", None), pointer

            def __exit__(self, *_):
                _local.stream = self.before

        return Used()


@pytest.fixture(params=[True, False], ids=["since 14", "before 14"])
def cupy(request, monkeypatch):
    mock = Cupy(request.param)
    monkeypatch.setitem(sys.modules, "cupy", mock)
    return mock


def numbers():
    args = np.arange(len(FIELDS), dtype=np.int64) - 7
    args[INDEX["rank"]] = 1 << 40
    return args


def test_arguments_streams_and_devices(cupy):
    launcher = CupyLauncher(torch.device("cuda", 3))
    args = numbers()
    for stream in (77, 0, 77):
        launcher.launch("symm_meet", 5, 256, args, stream)
    assert [call[:5] for call in cupy.launched] == [
        (3, stream, "symm_meet", (5,), (256,)) for stream in (77, 0, 77)
    ]
    assert all((words == args).all() for *_, words in cupy.launched)
    assert getattr(_local, "device", 0) == 0


def test_all_kernels_are_there_before_the_first_is_launched(cupy):
    launcher = CupyLauncher(torch.device("cuda", 2))
    (module,) = cupy.modules
    assert module.loaded == {(2, name) for name in KERNELS}
    cupy.capturing = True
    for name in KERNELS:
        launcher.launch(name, 1, 64, numbers(), 5)
    assert len(cupy.launched) == len(KERNELS)


@pytest.mark.parametrize(
    "error", [RuntimeError("no libnvrtc"), OSError("no libnvrtc"), Exception("no libnvrtc")]
)
def test_what_keeps_cupy_from_compiling_is_told(monkeypatch, error):
    """All ranks hear of it then: another error of one would leave the others waiting."""
    monkeypatch.setitem(sys.modules, "cupy", Cupy(broken=error))
    with pytest.raises(UnsupportedError, match="no libnvrtc"):
        CupyLauncher(torch.device("cuda", 0))


def test_cupy_takes_our_arguments():
    cupy = pytest.importorskip("cupy")
    from cupy.cuda.function import Function

    stream = SimpleNamespace(ptr=0)
    launch = Function.__new__(Function)  # of no module: what is wrong with arguments comes first

    def said(argument):
        try:
            launch((1,), (1,), (argument,), stream=stream)
        except Exception as error:
            return str(error)
        raise AssertionError("a kernel of no module was launched")

    assert "size one" in said(np.zeros(len(FIELDS), np.int64))
    assert "size one" not in said(by_value(numbers()))
    assert cupy.cuda is not None


def test_cupy_compiles_our_kernels():
    """By the compiler that cupy has found; its RawModule asks a device for the architecture first."""
    pytest.importorskip("cupy")
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source(), "kernels.cu", (), ())
    nvrtc.compileProgram(program, (*OPTIONS, "-arch=sm_90"))
    assert set(re.findall(r"\.entry (symm_\w+)\(", nvrtc.getPTX(program).decode())) == set(KERNELS)
