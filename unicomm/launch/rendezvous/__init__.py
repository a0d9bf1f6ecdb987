"""How the launchers of a job's hosts meet: torch's rendezvous, on stores that strangers do not reach.

handlers.py       torch's rendezvous handlers with stores of ours: what listens where
state.py          the state of a rendezvous as JSON, so that nothing in a store is ever unpickled
connections.py    connections that begin with a proof of the job's token, and in which each message is signed
server.py         the store of the launchers, in the launcher that hosts the rendezvous
client.py         the store of the launchers, as each launcher sees it
source_filter.py  a filter in the kernel that lets only the job's hosts reach the ranks' store
"""
