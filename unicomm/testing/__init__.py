"""For tests of programs that communicate, and of backends.

ranks.py        run_ranks: ranks as threads of this process, over shared memory, in milliseconds
conformance.py  the conformance suite: what every backend has to do, as data
"""

from .ranks import run_ranks

__all__ = ["run_ranks"]
