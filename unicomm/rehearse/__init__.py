"""Programs run as many ranks on one machine, without moving data: do the ranks' operations fit together?

rehearsal.py        rehearse: runs the ranks, plays what they recorded, and has the analyzer judge it
ranks.py            the parent: imports once, forks each rank
rank.py             one rank: its environment, its program, its end
backend.py          the backend that stands for all others; records where the program waits
values.py           what a rank would receive, made up from its own data
notes.py            small values that other ranks have really sent
meeting.py          stores and collectives of objects without other ranks
received.py         lines of the program that read received data
recorded_table.py   the ranks' rings as one table
play.py             the blocking rules, and the search for a schedule that hangs
judge.py            the end of a schedule as a table for the analyzer
github.py           findings as annotations of a pull request

Each file imports only files that stand below it, but for github.py.
"""
