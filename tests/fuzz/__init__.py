"""Coverage-guided fuzzing of everything that reads what somebody else wrote.

seeds.py      real inputs: rings, dumps, archives, ending files, traces and messages
mutations.py  inputs changed with their format in mind: fields of rings, JSON trees, pickles, archives
targets.py    for each kind of input, what reads it, and what has to hold afterwards
limits.py     the memory and the time of a call, and what output may contain
fuzzer.py     the process that fuzzes one target (atheris)
minimise.py   the smallest input that breaks a promise in the same way
conductor.py  `make fuzz`: targets in turn; what breaks a promise is minimised and kept in corpus/
corpus/       inputs that once broke a promise, by target
test_fuzz.py  a minute of it in the suite, and all of corpus/
"""
