"""The backends `nvshmem` and `rocshmem`, and a base for any library with a table of csrc/symm/table.hpp.

backend.py         the backend: creation, split, operations, failures, end
creation.py        hints, the heap of the first communicator, and the connections beside it
heap.py            the library's memory in this process: one heap, with a region for each communicator
chunk_transfer.py  bytes between ranks, in chunks, each with a signal
"""
