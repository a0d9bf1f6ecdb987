"""Memory that other ranks reach: registered tensors, windows, and symmetric heaps of hosts and devices.

allocator.py       tensors in a backend's own memory, and registration of others
window.py          Window: one-sided access, its checks and its interface
heap_window.py     windows over symmetric memory
library_window.py  windows over a library's own one-sided operations
symmetric.py       the symmetric memory of a communicator
heap_tensors.py    the tensors on a symmetric heap, which end when their memory is freed
initialize.py      connects it, for a communicator or a team of its ranks
device_memory.py   symmetric memory on devices
device_domain.py   the heap of a device, with the operations of the native core's heap
device_kernels.py  compiles and launches the kernels
"""
