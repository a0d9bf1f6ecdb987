"""The backends `nccl` and `rccl`: GPUs, through the C interface that the two libraries share (csrc/nccl).

backend.py            the backend: creation, end, failures, symmetric memory, memory of tensors
collectives.py        collectives and messages, as calls of the library's functions
handle.py             one rank's `ncclComm_t`, and the checks of calls on it
creation.py           creating the library's communicators: new, split, shrink, grow
shrink_and_grow.py    creating a reconfigured communicator from that of the previous epoch
registered_memory.py  memory of the library for tensors, its registration, and windows
window_table.py       symmetric memory on one of the library's windows
hints.py              hints, most of which are fields of the library's config
type_codes.py         the library's codes for element types and reductions
library.py            NCCL and RCCL as data; an opened library, which turns result codes into errors
library_log.py        the library's log, kept in memory
result_codes.py       errors for the library's result codes
known_causes.py       the catalogue of known causes and their cures
"""
