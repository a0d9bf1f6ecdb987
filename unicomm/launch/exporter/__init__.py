"""The exporter: a process beside the launcher of each host that serves metrics of the host's ranks over HTTP.

server.py            the exporter's process: commands of the launcher, and the HTTP server
followed_rings.py    FollowedRings: counts the operations in rings while ranks write to them
exporter_process.py  the exporter as the launcher sees it
"""
