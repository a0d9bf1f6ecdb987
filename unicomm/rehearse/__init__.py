"""Programs run as many ranks on one machine, without a network: do the ranks' operations fit together?

github.py           findings as annotations of a pull request
what_if.py          changes of a job whose forecasts are compared
rehearsal.py        rehearse: runs the ranks, plays what they recorded, and has the analyzer judge it
judge.py            the end of a schedule as a table for the analyzer
groups.py           groups that some member never makes, calls of new_group that some ranks do not make
forecast/           bytes, time and memory of the communication, for a topology
play.py             the blocking rules, and the search for a schedule that hangs
recorded_table.py   the ranks' rings and details as one table
ranks.py            the parent: forks each rank
hash_seeds.py       ranks in interpreters of their own, whose sets have another order
imports.py          what is imported once, before ranks are forked
rank.py             one rank: its environment, its program, its end
backend.py          the backend that stands for all others; records where the program waits
meeting.py          stores and collectives of objects without other ranks
hollow/             large tensors without data, for models larger than the memory
simulated_cuda.py   GPUs that are not there, for programs that say `cuda`
values/             what a rank receives: made up, real, or recorded in a small run
details.py          what a ring has no room for: tags, sizes of parts, processor times, places of groups
compat.py           private parts of torch that only rehearsals use
places.py           the line of the program that runs

Each file imports only files that stand below it.
"""
