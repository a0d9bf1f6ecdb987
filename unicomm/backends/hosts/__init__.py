"""Several hosts: shared memory within each host, UCX or Gloo between hosts.

backend.py       the backend: its parts, and the one error for their failures
collectives.py   collectives of several hosts, in steps within hosts and between them
first_step.py    the first step of every collective: comparing signatures
supervisor.py    what the native fast path asks for
messages.py      messages over both parts at once
layout.py        which ranks share a host
"""
