"""Connecting to a host that has just been cut off: nothing comes back, no refusal either."""

import socket
import struct
import threading
from types import SimpleNamespace

import pytest

from tests.backends.out_of_band.test_connecting import silent_address
from tests.ucx_here import needs_ucx
from unicomm.backends.ucx.backend import _worker
from unicomm.backends.ucx.library import open_library
from unicomm.comms.failures.process_sockets import internet_sockets

pytestmark = [needs_ucx, pytest.mark.timeout(200)]
_WITHIN = 30.0  # seconds; the system tries for more than two minutes


def _listening():
    """Ports at which this process listens."""
    return {
        s.getsockname()[1]
        for s in internet_sockets()
        if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def test_a_silent_host_holds_up_nobody():
    setup = SimpleNamespace(hints={"tls": "tcp", "devices": "lo"}, rank=0, size=2, name="c")
    worker = _worker(setup, open_library(), 0.0001)
    before = _listening()
    other = _worker(SimpleNamespace(**{**vars(setup), "rank": 1}), open_library(), 0.0001)
    (port,) = _listening() - before
    with silent_address() as (_, silent):
        theirs = other.address.replace(struct.pack("!H", port), struct.pack("!H", silent))
        assert theirs != other.address

        def connect():
            worker.connect([worker.address, theirs])
            said.append(worker.greet(0.5))

        said: list[bool] = []
        connecting = threading.Thread(target=connect, daemon=True)
        connecting.start()
        connecting.join(_WITHIN)
        assert said == [False]
    worker.drop()
    other.drop()
