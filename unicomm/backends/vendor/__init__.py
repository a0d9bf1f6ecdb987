"""Libraries of GPU vendors, which are found and opened at run time; shared by the GPU backends.

library_search.py   a vendor's library as data, and where it is looked for
shmem_libraries.py  NVSHMEM and rocSHMEM, and how their tables are opened
device_runtime.py   the CUDA and HIP runtimes: memory that processes share, and copies
"""
