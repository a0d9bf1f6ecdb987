"""What went wrong, which ranks are to blame, and how all ranks of a communicator learn of it.

faults.py               a fault as data; the error, the wire form and the renumbering of its ranks
first_cause.py          the first cause of a failure, which all ranks raise, published in the store
missing_ranks.py        where the ranks are that did not come, by the recorders' rings on this host
thread_quiescence.py    whether all threads of this process wait, for the search for deadlocks
open_communicators.py   the communicators of this process that are not finalized
store_client.py         requests to a store for one communicator, with its deadline and its errors
store_requests.py       requests to a store in a thread, which a silent store holds instead of the caller
process_sockets.py      the sockets that this process has open
daemon_pool.py          threads for calls that may never return
thread_start.py         starts of threads that end in an error without memory
"""
