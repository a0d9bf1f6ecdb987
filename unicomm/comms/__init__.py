"""The communicator: the same semantics on every backend.

At the root stands what users hold, and what backends implement:

communicator.py  Communicator: the methods that users call
properties.py    what a communicator says of itself: rank, size, device, backend, memory
work.py          Work: the handle of an operation
batch.py         sends and receives that run together
persistent.py    persistent all-gather
window.py        new_window: one-sided access to the other ranks' tensors
objects.py       Python objects between ranks
options.py       options, timeouts, hints
errors.py        the tree of errors
backend.py       the backend protocol
streams.py       streams and events of a device, for backends

A room below imports errors, options, streams, work and the backend protocol, and the rooms before it. The
other files above import the rooms:

operations/      what an operation is: table, types, checks, calls
failures/        what went wrong and who is to blame
execution/       how an operation runs
membership/      who takes part: rendezvous, create, split, finalize, reconfigure
memory/          memory that other ranks reach
"""
