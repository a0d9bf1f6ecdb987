"""A hub that waits longer for other hubs: python -m tests.launch.patient_hub, in place of the usual module.

The usual patience is two seconds, in which a busy machine may let no hub answer.
"""

from unicomm.launch.hub import server

server.PATIENCE = 30.0  # less than `server.GATHERING`, which holds for the whole of what others ask for

if __name__ == "__main__":
    server.main()
