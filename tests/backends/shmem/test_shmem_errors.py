"""What the SHMEM backends refuse, and what to do about it."""

import pytest
import torch

import unicomm
from tests.mocks.shmem import host_shmem
from unicomm import _core, symm
from unicomm.backends.vendor import shmem_libraries as vendors
from unicomm.comms.operations.symmetric_table import Capability
from unicomm.testing import run_ranks


def test_a_library_that_is_not_there_says_where_it_was_looked_for():
    sonames = ("libnone-at-all.so",)
    nowhere = vendors.ShmemVendor("none", "None", sonames, (), "get it", _core.symm_nvshmem, lambda: "")
    expected = r"None is not on this machine; .*libnone-at-all\.so"
    with pytest.raises(unicomm.UnsupportedError, match=expected) as error:
        vendors.open_table(nowhere)
    assert error.value.hint == "get it"


def test_the_file_that_is_asked_for_or_none(tmp_path):
    def by_path(path, loaded):
        if loaded:
            raise OSError("it is not in the process")
        return _core.symm_library(path)

    wrong = tmp_path / "libwrong.so"
    wrong.write_bytes(b"no library")
    vendor = vendors.ShmemVendor("none", "None", ("libc.so.6",), (), "", by_path, lambda: "")
    with pytest.raises(unicomm.UnsupportedError, match="libwrong") as error:
        vendors.open_table(vendor, str(wrong))
    assert "libc" not in str(error.value)


def test_a_table_without_signals_is_refused():
    class Silent(host_shmem.HostShmem):
        name = "host-shmem-silent"

        @classmethod
        def table(cls, path=""):
            return _core.symm_host().limited(int(~Capability.SIGNAL))

    unicomm.register_backend(Silent.name, Silent)
    with pytest.raises(unicomm.UnsupportedError, match="what the backend 'host-shmem-silent' needs: signal"):
        unicomm.new_comm(Silent.name, "cpu", rank=0, size=1)


def test_only_devices():
    with pytest.raises(unicomm.InvalidArgumentError, match="'nvshmem' has no device type 'cpu'"):
        unicomm.new_comm("nvshmem", "cpu", rank=0, size=1)
    with pytest.raises(unicomm.UnsupportedError, match="cannot change its ranks"):
        unicomm.new_comm(host_shmem.NAME, "cpu", enable_reconfigure=True)


def test_hints_are_read():
    for hint, value in (("communicators", "0"), ("staging_bytes", "much"), ("staging_bytes", "383")):
        with pytest.raises(unicomm.InvalidArgumentError, match=hint):
            unicomm.new_comm(host_shmem.NAME, "cpu", rank=0, size=1, hints={hint: value})


def test_a_heap_that_is_too_small_is_an_error_on_all():
    hints = {"heap_bytes": "1M", "staging_bytes": "1M"}
    with pytest.raises(unicomm.BackendError, match=r"no room for \d+ bytes") as error:
        run_ranks(lambda comm: None, 2, backend=host_shmem.NAME, hints=hints)
    assert error.value.culprits == (0, 1)


def test_mismatches_are_caught_and_leave_all_in_step():
    def program(comm):
        x = torch.ones(4 if comm.get_rank() else 5)
        with pytest.raises(unicomm.MismatchError):
            comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
        y = torch.ones(3)
        comm.all_reduce(y, unicomm.ReduceOp.SUM, False)
        return y.tolist()

    assert run_ranks(program, 2, backend=host_shmem.NAME) == [[2.0] * 3] * 2


def test_symmetric_memory_is_that_of_all():
    def program(comm):
        symm.init(comm)
        x = symm.empty(4, comm=comm)
        part = comm.split([comm.get_rank()])
        with pytest.raises(unicomm.UnsupportedError, match="one symmetric memory") as error:
            symm.init(part)
        assert "init_team" in error.value.hint
        part.finalize()
        x.fill_(comm.get_rank() + 1)
        return symm.one_shot_all_reduce(x, comm).tolist()

    assert run_ranks(program, 2, backend=host_shmem.NAME) == [[3.0] * 4] * 2


def test_the_device_is_used_before_the_library_looks_for_it():
    """The library takes the device by the thread's context, of which there is none before the first use."""
    calls = []

    class Device(host_shmem.HostShmem):
        name = "host-shmem-device"

        @classmethod
        def use_device(cls, device):
            calls.append("used")
            super().use_device(device)

        @classmethod
        def table(cls, path=""):
            real = super().table(path)

            class Table:
                name, capabilities = real.name, real.capabilities
                unique_id, discard_id = real.unique_id, real.discard_id

                def init(self, *arguments):
                    calls.append("looked")
                    return real.init(*arguments)

            return Table()

    unicomm.register_backend(Device.name, Device)
    with unicomm.new_comm(Device.name, torch.device("cpu"), rank=0, size=1, name="alone") as comm:
        comm.barrier(False)
    assert calls == ["used", "looked"]


def test_what_nobody_has_received_does_not_reach_a_later_communicator():
    def program(comm):
        me = comm.get_rank()
        for turn in range(3):
            first = comm.split([0, 1], f"first {turn}")
            if me == 0 and turn < 2:
                first.send(torch.full((2,), 111.0), 1, False)
            comm.barrier(False)
            first.finalize()
            second = comm.split([0, 1], f"second {turn}")
            x = torch.full((2,), 222.0)
            if me == 0:
                second.send(x, 1, False)
            else:
                second.recv(x.zero_(), 0, False)
            assert x.tolist() == [222.0] * 2
            whole = torch.zeros(2)
            second.all_gather_single(whole, torch.full((1,), float(me)), False)
            assert whole.tolist() == [0.0, 1.0]
            second.finalize()

    run_ranks(program, 2, backend=host_shmem.NAME)
