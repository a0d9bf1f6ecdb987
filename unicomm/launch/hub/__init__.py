"""The hub: a process beside the launcher of each host that shows and gathers the rings of a job.

server.py       the hub's process: requests, and the other hubs of the job
gather.py       what a hub reads: the rings of its host, and those of all hosts
protocol.py     the messages between hubs and viewers, encryption and authentication, a connection to a hub
hub_process.py  the hub as the launcher sees it
view.py         `unicomm trace top --connect`: the live view through a hub
"""
