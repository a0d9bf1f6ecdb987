"""Constants of records: states and flags, from the native core (csrc/recorder/ring.hpp)."""

from __future__ import annotations

from unicomm import _core

COMPLETED, FAILED = _core.RECORD_COMPLETED, _core.RECORD_FAILED  # states of an operation
BROKEN = _core.COMM_FAILED  # state of a communicator
ASYNC, P2P, BATCH, RECEIVE = _core.RECORD_ASYNC, _core.RECORD_P2P, _core.RECORD_BATCH, _core.RECORD_RECEIVE
CAPTURED, REPLAYED, REPLAY = _core.RECORD_CAPTURED, _core.RECORD_REPLAYED, _core.RECORD_REPLAY
INPUT_CHECKSUM, OUTPUT_CHECKSUM = _core.RECORD_INPUT_CHECKSUM, _core.RECORD_OUTPUT_CHECKSUM
COMPARED = _core.RECORD_COMPARED  # the ranks have compared the checksums of their outputs
ENCODED = _core.RECORD_ENCODED  # elements in a wire format
FROM_ANY = _core.RECORD_FROM_ANY
OTHER_ERROR = _core.RECORD_OTHER_ERROR  # the error code of an error that is no fault
