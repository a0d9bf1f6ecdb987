"""Something else in the process that uses NVSHMEM by its C interface."""

import ctypes

import torch


class Foreign:
    """Something else in the process that initialises the library, as nvshmem4py and torch do."""

    def __init__(self, library, comm):
        """`comm`: a communicator of the same ranks, by which they exchange the id."""
        self._comm, self._c, self._id = comm, ctypes.CDLL(library), None

    def begin(self, pe, pes):
        """Makes this process PE `pe` of a world of `pes`, of which rank 0 has the id."""
        uid, attr = ctypes.create_string_buffer(128), ctypes.create_string_buffer(144)
        version = (1 << 16) + 128
        uid[:4] = version.to_bytes(4, "little")
        if self._comm.get_rank() == 0:
            assert self._c.nvshmemx_get_uniqueid(uid) == 0
        if pes > 1:
            note = torch.frombuffer(bytearray(uid.raw), dtype=torch.uint8)
            self._comm.broadcast(note, 0, False)
            uid = ctypes.create_string_buffer(note.numpy().tobytes(), 128)
        attr[:4] = ((1 << 16) + 144).to_bytes(4, "little")
        attr[16:20] = ((1 << 16) + 128).to_bytes(4, "little")  # InitArgs
        attr[24:28] = ((1 << 16) + 24).to_bytes(4, "little")  # IdArgs
        assert self._c.nvshmemx_set_attr_uniqueid_args(pe, pes, uid, attr) == 0
        assert self._c.nvshmemx_hostlib_init_attr(1 << 3, attr) == 0
        self._id = uid  # the library keeps its address

    def end(self):
        """Finalizes the world. Collective."""
        self._c.nvshmemx_hostlib_finalize()
