"""What an operation is, before it runs.

table.py            the operation table: name, tensors, root, reduction and splits of each operation
dtypes.py           element types, and their numbers in the core and in recordings
reduction.py        reduce operations
reproducible.py     reductions with the same bits in any order: the hint, and what it makes of a call
wire.py             fewer bytes between hosts: the hint, and what it makes of a call
arrays.py           arrays of numpy and with DLPack as tensors on the same memory
call.py             Call, Message and OpArgs: what backends and hooks receive
check.py            from a call's arguments to a validated Call
numbers.py          checks of whole numbers, and of the sizes of a tensor
parts.py            tensors as flat bytes, whole or cut into one part for each rank
recording.py        states and flags of recorded operations
symmetric_table.py  the table of symmetric memory: capabilities, signals
"""
