"""Formats: torch's dumps, written from rings and read; Perfetto's traces, written.

operation_names.py  names of operations and element types in torch, torchcomms and vendor libraries, and ours
torch_dump.py       a ring as torch's dump: plain data, to be written as JSON or pickle
dump_columns.py     the entries of a dump as columns, from plain data
pickles.py          the entries of a dump as columns, from a pickle, without running anything in it
perfetto_packets.py  traces in Perfetto's binary format, for reports and for the profiler
byte_columns.py     columns of numbers as bytes: many similar records at once
"""
