"""The flight recorder: always on, readable from outside, also after the process is gone.

folder.py   where the rings live: chosen, private, bounded, cleaned
writer.py   this process's ring (imports the native core, not torch)
ring.py     reading ring files (imports numpy, not torch)
formats.py  records -> JSON and the pickle that torch's analyzer reads
hook.py     FlightRecorderHook: torchcomms' interface over the ring
show.py     the rings of all ranks as a table
"""
