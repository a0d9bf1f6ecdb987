"""What runs in the recorded process. These files import the native core.

writer.py      this process's ring: opened by the first communicator, closed when the process ends
ending.py      how this process ends: exceptions, sys.exit and crashes, noted beside its ring
dumps.py       dumps of this process's ring: on request, when a communicator breaks, on a signal
hook.py        FlightRecorderHook: torchcomms' interface to the recorder
thread_frames.py  where each thread of this process is
tracebacks.py  tracebacks of unhandled errors, without unicomm's own frames
"""
