"""How ranks find each other before they are connected: addresses, hosts, and what launchers offer.

Backends and `new_comm` import the names of this face only.

addresses.py         the address of this host that the other ranks reach
same_host.py         what ranks of one host have in common
store.py             the store of ranks on several hosts without MASTER_ADDR
pmi.py               a text from rank 0 to all ranks by PMI-1 and PMI-2
pmix.py              the same by PMIx
pmix_client.py       the process that pmix.py starts for one exchange
mpi_library.py       the process's MPI: loading, initialising and finalizing it, and a text by it
"""

from . import addresses, mpi_library
from .same_host import host_identity
from .store import store_of_job

__all__ = ["addresses", "host_identity", "mpi_library", "store_of_job"]
