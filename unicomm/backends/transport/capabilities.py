"""What every backend over a transport can do."""

from __future__ import annotations

from unicomm.backends.out_of_band import CHECK_HINT, SILENCE_HINT
from unicomm.comms.backend import Capabilities
from unicomm.comms.operations.dtypes import DTYPES
from unicomm.comms.operations.reduction import RedOpType
from unicomm.comms.options import Hint

HINTS = (
    Hint("hostname", str, "", "Name or address at which this rank listens at creation. Default: by routing."),
    Hint("interface", str, "", "Network interface for that, such as eth0."),
    SILENCE_HINT,
    CHECK_HINT,
)
_OPERATIONS = (
    "broadcast",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_v",
    "reduce_scatter_single",
)


def capabilities(*hints: Hint) -> Capabilities:
    """Returns those of a backend that takes these hints besides `HINTS`."""
    return Capabilities(
        device_types=frozenset({"cpu"}),
        operations=frozenset(_OPERATIONS),
        reduce_dtypes=frozenset(DTYPES),
        reduce_ops=frozenset(RedOpType),
        bytes_only=True,
        checks_mismatch=True,
        empty_parts=True,
        hints=(*HINTS, *hints),
    )
