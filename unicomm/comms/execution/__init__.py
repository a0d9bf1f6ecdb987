"""Execution: how an operation runs, from checked arguments to its end.

    engine.issue -> IssuedOperation -> executor.run -> records, profiler event, backend -> completion or
    failure

issued.py          the issued operation: one object for whatever a user calls
engine.py          the order of a communicator's operations, hooks, numbers, failures
assembly.py        makes an engine with the executor and fast path that its backend needs
executor.py        what an executor is
member.py          what a communicator is made of on this rank
host.py            the host executor: operations that block a thread
worker.py          the thread of asynchronous operations on the host
message_queue.py   sends and receives of a process group, which run side by side
device/            the stream executor: operations on a device's streams
point_to_point.py  sends, receives and batches as issued operations
one_sided.py       one-sided operations and symmetric memory as issued operations
composed/          collectives made of messages, and what options add to any: wire formats, checksums
fast_path.py       the native executor that may take a plain operation whole
hooks.py           hooks before and after operations, and at an abort
operation_log.py   clog: the operation log
expect_slow.py     extends the other ranks' deadlines
profiling/         operations as events of torch.profiler
"""
