"""The commonest faults, in real jobs of `unicomm run`: does the verdict name rank, cause and line?

program.py              the program: a training loop in which one rank gets a fault
faulty_runs.py          runs it on one host or on two, and holds the verdict to what is expected
conductor.py            `make faults`: all faults on all places, and the table of docs/trace/reading.md
test_fault_verdicts.py  each fault once, in the suite
"""
