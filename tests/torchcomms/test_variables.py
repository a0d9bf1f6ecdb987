"""Environment variables of torchcomms, and entry points of its group."""

import json
from importlib.metadata import EntryPoint

import pytest
import torch

from unicomm import torchcomms
from unicomm.backends import registry
from unicomm.backends.fake import FakeBackend
from unicomm.comms.errors import InvalidArgumentError, UnsupportedError
from unicomm.torchcomms import creation, objcol

CPU = torch.device("cpu")


@pytest.mark.parametrize(("text", "aborts"), [("", False), ("1", True), ("true", True), ("0", False)])
def test_abort_on_error(monkeypatch, text, aborts):
    monkeypatch.setenv("TORCHCOMM_ABORT_ON_ERROR", text)
    comm = torchcomms.new_comm("fake", CPU, "x")
    assert comm.get_options().abort_process_on_timeout_or_error is aborts
    comm.finalize()
    comm = torchcomms.new_comm("fake", CPU, "x", not aborts)
    assert comm.get_options().abort_process_on_timeout_or_error is not aborts
    comm.finalize()


def test_the_default_on_a_gpu_is_to_abort(monkeypatch):
    monkeypatch.delenv("TORCHCOMM_ABORT_ON_ERROR", raising=False)
    assert creation._aborts_by_default(torch.device("cuda"))
    assert not creation._aborts_by_default(CPU)


def test_abort_on_error_that_cannot_be_read(monkeypatch):
    monkeypatch.setenv("TORCHCOMM_ABORT_ON_ERROR", "perhaps")
    with pytest.raises(InvalidArgumentError, match="TORCHCOMM_ABORT_ON_ERROR"):
        torchcomms.new_comm("fake", CPU, "x")


def test_timeout(monkeypatch):
    monkeypatch.setenv("TORCHCOMM_TIMEOUT_SECONDS", "7")
    comm = torchcomms.new_comm("fake", CPU, "x")
    assert comm.get_options().timeout.total_seconds() == 7
    comm.finalize()


def test_gloo_variables_become_hints(monkeypatch):
    monkeypatch.setenv("UNICOMM_BACKEND", "gloo")
    monkeypatch.setenv("TORCHCOMM_GLOO_HOSTNAME", "127.0.0.1")
    comm = torchcomms.new_comm("gloo", CPU, "x")
    assert comm.get_options().hints == {"hostname": "127.0.0.1"}
    comm.finalize()
    comm = torchcomms.new_comm("gloo", CPU, "x", hints={"hostname": "localhost", "lazy": "1"})
    assert comm.get_options().hints == {"hostname": "localhost"}
    comm.finalize()


def test_gloo_variables_mean_nothing_to_other_backends(monkeypatch):
    monkeypatch.setenv("TORCHCOMM_GLOO_INTERFACE", "eth9")
    comm = torchcomms.new_comm("shm", CPU, "x", hints={"torchcomm::ncclx::blocking": "1"})
    assert comm.get_options().hints == {}
    comm.finalize()


def test_recorder_size(monkeypatch, fresh_recorder):
    comm = torchcomms.new_comm("fake", CPU, "x")
    monkeypatch.setenv("TORCHCOMM_FR_BUFFER_SIZE", "2")
    shared = torchcomms.hooks.FlightRecorderHook()
    own = torchcomms.hooks.FlightRecorderHook(3, isolated=True)
    for hook in (shared, own):
        hook.register_with_comm(comm)
    for _ in range(5):
        comm.barrier(False)
    assert [len(json.loads(hook.dump_json())["entries"]) for hook in (shared, own)] == [2, 3]
    comm.finalize()
    monkeypatch.setenv("TORCHCOMM_FR_BUFFER_SIZE", "many")
    with pytest.raises(InvalidArgumentError, match="TORCHCOMM_FR_BUFFER_SIZE"):
        torchcomms.hooks.FlightRecorderHook()


def test_the_recorder_hook_follows_its_communicator_through_reconfigure(fresh_recorder):
    comm = torchcomms.new_comm("shm", CPU, "x", enable_reconfigure=True)
    hook = torchcomms.hooks.FlightRecorderHook()
    hook.register_with_comm(comm)
    for uuid in (1, 2):
        comm.reconfigure(uuid, [comm.get_init_handle()])
        comm.barrier(False)
    names = [entry["profiling_name"].split(":")[-1] for entry in json.loads(hook.dump_json())["entries"]]
    assert names == ["barrier", "barrier"]
    comm.finalize()


def test_serialization(monkeypatch):
    assert (objcol._codec(True), objcol._codec(False)) == ("safe", "trusted")
    monkeypatch.setenv("TORCHCOMMS_SERIALIZATION", "pickle")
    assert (objcol._codec(True), objcol._codec(False)) == ("pickle", "pickle")
    comm = torchcomms.new_comm("shm", CPU, "x")
    held = [None]
    objcol.all_gather_object(comm, held, range(3))  # torch.load(weights_only=True) takes no range
    assert held == [range(3)]
    monkeypatch.delenv("TORCHCOMMS_SERIALIZATION")
    with pytest.raises(InvalidArgumentError):
        objcol.all_gather_object(comm, held, range(3))
    comm.finalize()


class Theirs(FakeBackend):
    name = "theirs"


def entry(monkeypatch, value):
    found = EntryPoint("theirs", value, creation.ENTRY_POINTS)
    monkeypatch.setattr(creation, "entry_points", lambda group, name: [found] if name == found.name else [])
    monkeypatch.setattr(registry, "_registered", {})
    return found


def test_a_backend_of_torchcomms_entry_points(monkeypatch):
    monkeypatch.setattr(EntryPoint, "load", lambda self: Theirs)
    entry(monkeypatch, "module:Theirs")
    assert torchcomms.is_backend_built("theirs")
    assert not torchcomms.is_backend_registered("theirs")
    comm = torchcomms.new_comm("theirs", CPU, "x")
    assert comm.get_backend() == "theirs"
    assert torchcomms.is_backend_registered("theirs")
    comm.finalize()


def test_a_module_that_was_compiled_for_torchcomms(monkeypatch):
    monkeypatch.setattr(EntryPoint, "load", lambda self: json)
    entry(monkeypatch, "json")
    with pytest.raises(UnsupportedError, match="no unicomm backend"):
        torchcomms.new_comm("theirs", CPU, "x")


def test_an_unknown_backend():
    with pytest.raises(ModuleNotFoundError, match="failed to find backend nothing"):
        torchcomms.new_comm("nothing", CPU, "x")
    assert not torchcomms.is_backend_built("nothing")


def test_registering_a_backend(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    torchcomms.register_backend("theirs", Theirs)
    comm = torchcomms.new_comm("theirs", CPU, "x")
    assert comm.get_backend() == "theirs"
    comm.finalize()


def test_memory_of_a_backend_without_communicators():
    with pytest.raises(RuntimeError, match="no open communicator of backend 'rocshmem'"):
        torchcomms.get_mem_allocator("rocshmem")


def test_hints_of_an_operation_are_not_looked_at(monkeypatch):
    comm = torchcomms.new_comm("shm", CPU, "x")
    comm.barrier(False, {"any": "thing"})
    with pytest.raises(TypeError, match="str"):
        comm.barrier(False, {"any": 1})
    with pytest.raises(TypeError, match="str"):
        comm.barrier(False, [("any", "thing")])
    comm.finalize()
