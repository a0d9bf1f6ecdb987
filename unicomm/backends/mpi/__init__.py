"""MPI, by mpi4py: whatever network the MPI library drives, one MPI communicator for each communicator.

backend.py      the backend: its creation and its end
operations.py   its operations, as requests that are polled
messages.py     messages that complete one by one
"""
