"""Creates the communicator of the backend `tcp`.

Each rank has two connections to each other one, made with the communicator: one by which the ranks tell each
other of failures, and one for messages (csrc/tcp/streams.hpp). Nothing listens afterwards.
"""

from __future__ import annotations

import os

from unicomm import _core
from unicomm.backends.out_of_band import connect_all
from unicomm.backends.transport import HOT, TransportBackend, capabilities, find_place
from unicomm.comms.backend import Setup
from unicomm.comms.errors import BackendError, first_line


class TcpBackend(TransportBackend):
    name = library = "tcp"
    capabilities = capabilities()

    @classmethod
    def connect(cls, setup: Setup) -> TcpBackend:
        if setup.size == 1:
            return cls(setup, _core.TcpStreams(0, 1, HOT), {})
        place = find_place(setup, cls.library)
        streams, trouble = None, ""
        try:
            streams = _core.TcpStreams(setup.rank, setup.size, place.spin)
        except OSError as error:
            trouble = first_line(error)
        told, messages = connect_all(setup, place.address, 2, cls.library, trouble)
        assert streams is not None
        connections = [messages[r].detach() if r in messages else -1 for r in range(setup.size)]
        try:
            streams.connect(connections)
        except OSError as error:
            for socket in told.values():
                socket.close()
            raise BackendError(
                f"tcp could not connect: {first_line(error)}",
                comm=setup.name,
                culprits=[setup.rendezvous.labels[setup.rank]],
                hint="raise the limits of this process or user: `ulimit -n`, fs.epoll.max_user_watches",
            ) from error
        return cls(setup, streams, told)

    @classmethod
    def version(cls) -> str:
        return f"Linux {os.uname().release}"
