"""Examples of the reference: Python objects. `comm` is a communicator of two ranks."""

from unicomm import objcol

# %% objcol.all_gather_object
found = [None] * comm.size
objcol.all_gather_object(comm, found, {"rank": comm.rank})
assert found == [{"rank": 0}, {"rank": 1}]

# %% objcol.gather_object
found = [None] * comm.size if comm.rank == 0 else None
objcol.gather_object(comm, comm.rank * 10, found, root=0)
assert found in ([0, 10], None)

# %% objcol.broadcast_object_list
config = ["adam", {"lr": 0.1}] if comm.rank == 0 else [None, None]
objcol.broadcast_object_list(comm, config, root=0)
assert config == ["adam", {"lr": 0.1}]

# %% objcol.scatter_object_list
mine = [None]
objcol.scatter_object_list(comm, mine, ["a", "b"] if comm.rank == 0 else None, root=0)
assert mine == ["a" if comm.rank == 0 else "b"]

# %% objcol.send_object_list, objcol.recv_object_list
if comm.rank == 0:
    objcol.send_object_list(comm, ["step", 7], dst=1)
else:
    got = [None, None]
    objcol.recv_object_list(comm, got, src=0)
    assert got == ["step", 7]
