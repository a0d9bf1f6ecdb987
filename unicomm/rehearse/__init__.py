"""Programs run as many ranks on one machine, without moving data: do the ranks' operations fit together?

rehearsal.py        rehearse: runs the ranks, plays what they recorded, and has the analyzer judge it
ranks.py            the parent: imports once, forks each rank
rank.py             one rank: its environment, its program, its end
backend.py          the backend that stands for all others; records where the program waits
details.py          what a ring has no room for: tags, sizes of parts, places of groups
values.py           what a rank would receive, made up from its own data
real_values.py      what ranks really receive, through files
notes.py            small values that other ranks have really sent
meeting.py          stores and collectives of objects without other ranks
received.py         lines of the program that read received data
places.py           the line of the program that runs
turns.py            one rank at a time, while the others wait for data
recorded_table.py   the ranks' rings as one table
play.py             the blocking rules, and the search for a schedule that hangs
forecast/           bytes, time and memory of the communication, for a topology
groups.py           groups that a member never makes
judge.py            the end of a schedule as a table for the analyzer
github.py           findings as annotations of a pull request

Each file imports only files that stand below it, but for github.py.
"""
