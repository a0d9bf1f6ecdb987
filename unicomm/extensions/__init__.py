"""Optional parts that are compiled on the user's machine by `unicomm build`, and how they are found.

torch_extensions.py       extensions that need the ABI of the installed torch: sources, files, loading
build_torch_extension.py  compiles one of them with the machine's C++ compiler
build_rocshmem.py         compiles csrc/rocshmem with the user's hipcc and rocSHMEM
build_cache.py            the folder of compiled parts, and the lock for processes that build the same part
record_param_comms.cpp    source of the extension that emits torch's record_param_comms events
"""
