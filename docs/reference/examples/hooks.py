"""Examples of the reference: hooks. `comm` is a communicator of two ranks."""

import io
import json
import os
import pathlib

import torch

import unicomm
from unicomm import ReduceOp, hooks

# %% hooks.NanCheckHook, hooks.NanCheckHook.register_with_comm, hooks.NanCheckHook.is_enabled
check = hooks.NanCheckHook()
check.register_with_comm(comm)
assert check.is_enabled()
try:
    comm.all_reduce(torch.tensor([float("nan")]), ReduceOp.SUM)
except unicomm.CommError as error:  # before anything is sent
    assert "NaN detected in input tensor 0" in str(error)

# %% hooks.NanCheckHook.remove
check = hooks.NanCheckHook(check_inputs=False, check_outputs=True)
check.register_with_comm(comm)
check.remove()
assert not check.is_enabled()

# %% hooks.clog, hooks.clog.register_with_comm
log = io.StringIO()
hooks.clog(log, events=["ALL"]).register_with_comm(comm)
comm.barrier()
assert "|sig|barrier|" in log.getvalue()

# %% hooks.clog.flush, hooks.clog.close
log = hooks.clog(f"operations-{comm.rank}.txt", events=["NONE"])  # beginnings only
log.register_with_comm(comm)
comm.barrier()
log.flush()
assert "|Q|" in pathlib.Path(f"operations-{comm.rank}.txt").read_text()
log.close()

# %% hooks.FlightRecorderHook, hooks.FlightRecorderHook.register_with_comm, hooks.FlightRecorderHook.dump_json
recorder = hooks.FlightRecorderHook()
recorder.register_with_comm(comm)
comm.barrier()
unicomm.testing.drain(comm)
entries = json.loads(recorder.dump_json())["entries"]  # torch's format
assert entries[-1]["state"] == "completed"

# %% hooks.FlightRecorderHook.dump_file
os.environ["TORCHCOMM_FR_DUMP_TEMP_FILE"] = os.path.join(os.getcwd(), "dump_")
path = hooks.FlightRecorderHook().dump_file(comm.rank)  # what torchfrtrace reads
assert path.name == f"dump_{comm.rank}"

# %% hooks.FlightRecorderHook.size, hooks.FlightRecorderHook.reset, hooks.FlightRecorderHook.is_enabled
recorder = hooks.FlightRecorderHook()
recorder.register_with_comm(comm)
comm.barrier()
unicomm.testing.drain(comm)
assert recorder.size() == 1
recorder.reset()
assert recorder.size() == 0
assert recorder.is_enabled()  # the recorder cannot be switched off

# %% hooks.RemovableHandle, hooks.RemovableHandle.remove, hooks.OpArgs, hooks.OpName
seen = []


def note(name: hooks.OpName, op_id: int, args: hooks.OpArgs) -> None:
    seen.append((name, args.op))


handle = comm.register_pre_hook(note)
comm.all_reduce(torch.ones(1), ReduceOp.MIN)
handle.remove()
comm.barrier()  # not noted
assert seen == [(hooks.OpName.all_reduce, ReduceOp.MIN)]
