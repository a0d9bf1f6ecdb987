"""`unicomm doctor`: what this installation can do on this machine, what is missing, and the cure.

report.py          all checks together, as tables or as JSON; checks of the installation and of the launcher
backends.py        checks of each backend on the CPU, and of backends of other packages
gpu_backends.py    checks of the GPU backends: library, functions, GPUs, self-test
summary.py         the report on one screen: what works, and the cure for what does not
network.py         the way to other hosts, and what is measured between the hosts of a job
network_report.py  what is off about that, and its output
findings.py        the results of checks
verified.py        what ran where, read from verified.json
"""
