"""What backends share whose library cannot be interrupted and blames nobody for what goes wrong.

Beside the library's own connections, each rank has out-of-band ones to all others: a fault channel, on which
the ranks tell each other what goes wrong, and, if they compare what they call, one for signatures.
Backends import the names of this face only.

backend.py          the base class of such backends: deadlines, culprits, abort, comparison of signatures
exchange.py         the base class of their exchanges: messages that complete one by one
fault_channel.py    one communicator's fault channel
operation.py        the operation that a rank is in, and the messages that it waits for
circles.py          ranks that wait for each other
channel_thread.py   the thread of a process that serves all its fault channels
wire.py             the messages on a fault channel, and how they are read
fault_errors.py     the errors that a fault raises
signatures.py       signatures of collectives, compared before anything is sent
sockets.py          sockets from each rank to each other one
user_frame.py       the user's line in a thread of this process
"""

from .backend import CHECK_HINT, OutOfBandBackend, checks_signatures
from .exchange import OutOfBandExchange, awaited_in
from .fault_channel import COMPARE, FaultChannel
from .operation import Awaited, Operation
from .signatures import SignatureCheck, frame_of
from .sockets import SILENCE_HINT, Sockets, connect_all, patience, receive_exactly, refuse

__all__ = [
    "CHECK_HINT",
    "COMPARE",
    "SILENCE_HINT",
    "Awaited",
    "FaultChannel",
    "Operation",
    "OutOfBandBackend",
    "OutOfBandExchange",
    "SignatureCheck",
    "Sockets",
    "awaited_in",
    "checks_signatures",
    "connect_all",
    "frame_of",
    "patience",
    "receive_exactly",
    "refuse",
]
