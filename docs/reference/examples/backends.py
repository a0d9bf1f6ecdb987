"""Examples of the reference: names of backends."""

import unicomm
from unicomm.comms.backend import Backend, Capabilities

# %% backend_names
assert {"shm", "gloo", "auto"} <= set(unicomm.backend_names())


# %% register_backend
class Lonely(Backend):
    """A backend for one rank, which has nothing to move."""

    name = "lonely"
    protocol_version = 1
    capabilities = Capabilities(device_types=frozenset({"cpu"}), bytes_only=True)

    @classmethod
    def connect(cls, setup):
        return cls()

    def exchange(self, messages, timeout):
        pass

    def abort(self):
        pass

    def close(self):
        pass


unicomm.register_backend("lonely", Lonely)
with unicomm.new_comm("lonely", "cpu") as own:
    own.barrier()
assert "lonely" in unicomm.backend_names()
