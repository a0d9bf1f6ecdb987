"""For tests of programs that communicate, and of backends.

ranks.py          run_ranks: ranks as threads of this process, over shared memory, in milliseconds;
                  drain: waits until all operations of a communicator are over and recorded
conformance.py    the conformance suite: what every backend has to do, as data
pytest_plugin.py  the fixture `rehearse`: a program as many ranks that move no data
narrow_values.py  values of narrow floats that show any second rounding
"""

from .ranks import drain, run_ranks

__all__ = ["drain", "run_ranks"]
