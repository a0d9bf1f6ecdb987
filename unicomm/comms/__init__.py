"""Semantics of the communicator, the same for all backends.

    errors.py       the error tree
    dtypes.py       element types          reduction.py   reduce operations
    ops.py          the operation table: every other file reads it
    check.py        arguments -> a validated Call           call.py   what a backend receives
    options.py      timeouts, hints, CommOptions
    environment.py  who am I: the launcher's variables
    job_store.py    where the ranks of a launcher meet
    rendezvous.py   who are the others, and do we agree (rendezvous_parts.py: its store and wire format)
    backend.py      the protocol that a backend fulfils, and its capabilities as data
    completion.py   what a library lacks, done above it once
    work.py         Work, and the worker that runs asynchronous operations in order
    hooks.py        pre, post and abort hooks, NanCheckHook           clog.py        the operation log
    engine.py       how an operation runs: order (in_order.py), records, hooks, errors
    point_to_point.py  the same for sends and receives
    stream_work.py  the same on a device's streams     stream_handle.py  their Work
    stream_fast.py  with less ado where nobody looks       graphs.py  what graphs take down and replay
    profiling.py    when torch.profiler runs     profiling_session.py  events and a table for its traces
    process_group.py  torch.distributed's process group     torch_work.py  its Work and futures
    torch_bridge.py extensions against torch's own ABI, where they have been built
    arrays.py       arrays of numpy and with DLPack as tensors
    communicator.py Communicator: the methods    lifecycle.py   creation, split, finalize
    reconfigure.py  the same communicator with other ranks     attempt.py    how these find each other
    handles.py      init handles, and calling one      endpoint.py    who is called
    remote_store.py a store in one rank's memory
    batch.py        send/recv batches            persistent.py  persistent all-gather
    slow.py         expect_slow: time that a rank asks the others for
    whereabouts.py  where the ranks are that did not come, by their rings
    objects.py      Python objects (objcol)
    memory.py       MemAllocator: tensors that a backend uses where they are, and telling it of others
    window.py       Window: one-sided access         heap_window.py, library_window.py  what is behind it
    symmetric.py    symmetric memory of a communicator        one_sided.py  how its operations run

Nothing in here imports a backend.
"""
