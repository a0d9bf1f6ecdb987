"""SHMEM libraries as backends: whatever has a table of csrc/symm/table.hpp with a heap, copies and signals.

vendors.py   NVSHMEM and rocSHMEM: what tells them apart, and where they are
heap.py      a library's memory in a process: one heap, with a region for each communicator
pipe.py      bytes to and from the other ranks of one, in chunks, each with a signal
making.py    hints, the heap, and connections beside it
backend.py   the communicator: creation, split, operations, end
"""
