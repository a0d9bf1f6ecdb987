"""Gloo: TCP between any hosts, through torch's `ProcessGroupGloo`, one for each communicator.

backend.py       the backend: its life, its collectives, waiting for them
messages.py      messages that complete one by one
waits.py         its waits for messages, and an end to them
connect.py       connecting, without Gloo's own waiting for ranks that do not come
connections.py   the connections that Gloo made, found to be ended
"""
