"""What went wrong in a job, from its table.

verdict.py           the closed list of verdicts; Finding, Straggler, Report
analyze.py           analyze: from a table to a report
matching.py          the calls of one collective compared, sends paired with receives
call_sites.py        the lines from which ranks call, and where ranks go out of step
call_mismatches.py   findings about collectives that ranks called with different arguments
partings.py          findings moved to where ranks went out of step
size_mismatches.py   findings about exchanges and messages whose sizes do not fit
silent_corruption.py findings about data that changed on the way, by checksums
wait_graph.py        the wait-for graph of unfinished operations, its components and cycles
evidence.py          evidence and edges for findings about waiting ranks
wait_cycles.py       findings about cycles in the wait-for graph
blocking_ranks.py    findings about ranks that block others: dead, stopped, absent, busy
own_faults.py       ranks that raise, exit, crash or are killed; where ranks are that hang
call_paths.py        the call paths behind a finding
stragglers.py        ranks, hosts and groups that are late
diff.py              compare: two runs, their first differing operations and changed times
data_diff.py         compare_data: the first operation of two runs whose data differ, by checksums
"""
