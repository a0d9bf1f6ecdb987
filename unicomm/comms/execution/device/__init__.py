"""Operations on a device: put on its streams, over when an event says so, watched by one thread per process.

executor.py  the stream executor
work.py      StreamWork: the handle of an operation on a device
fast.py      a short path for plain tensors
watchdog.py  the thread that looks after the operations of all communicators
failures.py  who is to blame for an overdue operation, agreed on with the other ranks
graphs.py    operations that graphs capture, and their replays
clock.py     when operations ran, by the host's clock
fold.py      reductions that the device's library lacks
encode.py    the wire formats
"""
