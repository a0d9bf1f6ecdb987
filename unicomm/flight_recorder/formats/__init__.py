"""Torch's flight recorder format: rings written in it, dumps read from it.

operation_names.py  names of operations and element types in torch, torchcomms and vendor libraries, and ours
torch_dump.py       a ring as torch's dump: plain data, to be written as JSON or pickle
dump_columns.py     the entries of a dump as columns, from plain data
pickles.py          the entries of a dump as columns, from a pickle, without running anything in it
"""
