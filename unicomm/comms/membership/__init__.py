"""Who takes part: how ranks find each other, become a communicator, and leave it. In the order of imports:

environment.py          this process's place in its job, by the launcher's variables
processes.py            whether a process that another rank has named still runs
rendezvous_parts.py     arguments, failures and encodings of the rendezvous
remote_store.py         a store in the memory of one rank, for the others
meeting_faults.py       why a meeting cannot succeed, found before its deadline
rendezvous.py           the members of a new communicator meet in a store and agree
tcp_store.py            opening a TCPStore within a deadline
job_store.py            the store in which the ranks of a launcher meet
handles.py              init handles, and calling the rank that one belongs to
endpoint.py             where other ranks reach a communicator that can be reconfigured
reconfigure_session.py  the ranks of a reconfiguration find each other
epoch.py                what reconfigure replaces in a communicator, and what it keeps
create.py               creation
store_users.py          which ranks still need the store of an epoch
split.py                a new communicator of some ranks of another one
finalize.py             finalize, the end of the process, forked children
reconfigure.py          a communicator with other ranks, as a new epoch
"""
