"""Hollow tensors: large tensors of a rank that have addresses and layouts, but values that nobody computes.

install.py   makes a process ready for them: pickling, objects, torch.compile, threads
mode.py      the dispatch mode that answers operations on hollow tensors
known.py     operations whose result is more than its layout
rules.py     what an operation does with hollow tensors: layouts of its results, and whether it really runs
memory.py    which tensors are hollow, how they are allocated, and the values made up for small results

Each file imports only files that stand below it, or below this package in that of `rehearse`.
"""
