"""NCCL and RCCL: GPUs, through the C interface that the two share (csrc/nccl).

library.py     where the library is, what it has, and calls that raise instead of returning a number
library_log.py what it writes into its log
errors.py      its result codes as errors of ours
causes.py      the catalogue of known causes and cures
types.py       element types and reductions: which it knows, and as what the others travel
hints.py       options: the fields of its config, and some of ours
backend.py     the communicator: creation, split, end       operations.py  what it does
making.py      making the library's communicators           succession.py  from the one before, in reconfigure
memory.py      memory for tensors, registration, windows
"""
