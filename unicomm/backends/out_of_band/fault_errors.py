"""Faults of a fault channel as errors; and faults by the message of a library's own error."""

from __future__ import annotations

import re
from dataclasses import replace

from unicomm._core import FaultCode
from unicomm.comms.errors import CommError
from unicomm.comms.failures import faults
from unicomm.comms.failures.faults import Fault

_NAMED = re.compile(r"rank (\d+): (.+)")


def error_of(fault: Fault, rank: int, library: str) -> CommError:
    """The error that rank `rank` raises for the fault; a new one each time."""
    if fault.by == rank:
        culprits = (rank,) if fault.code == FaultCode.INTERNAL else fault.culprits
        fault = replace(fault, by=-1, culprits=culprits)
    return faults.error_of(replace(fault, library=library))


def guess(text: str, rank: int) -> Fault:
    """A fault that no rank could explain, by the message of the library's error.

    A message that begins with a rank says why the connection to it has ended, as the native core's do.
    """
    if named := _NAMED.match(text):
        return Fault(FaultCode.PEER_LOST, rank, dead=(int(named[1]),), detail=named[2])
    signs = ("closed", "reset by peer", "Broken pipe", "refused")
    lost = any(sign in text for sign in signs)
    return Fault(FaultCode.PEER_LOST if lost else FaultCode.INTERNAL, rank, detail=text)
