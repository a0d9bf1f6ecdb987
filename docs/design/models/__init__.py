"""Models of the protocols, which an exhaustive search checks: README.md.

checker.py          the search: states, fair steps, invariants, shortest counterexamples
shm_rounds.py       rounds of shared memory: slots, signatures, tensors read in place, failures
wake_up.py          how a rank that sleeps in shared memory is woken
deadlock.py         the search for ranks that wait for each other
fault_channel.py    the agreement on a fault among ranks with out-of-band connections
first_cause.py      the first cause of a communicator of several hosts, in a store
rendezvous.py       how members meet in a store: posts, results, deadlines
reconfigure.py      the attempt of a reconfiguration: invitations, meeting, leaving
"""
