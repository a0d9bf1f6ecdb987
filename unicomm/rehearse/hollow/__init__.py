"""Hollow tensors: large tensors of a rank that have memory addresses, but whose values are never computed.

mode.py      the dispatch mode that answers operations on hollow tensors
rules.py     what an operation does with hollow tensors: shapes of its results, and whether it really runs
memory.py    which tensors are hollow, how they are allocated, and the values made up for small results

Each file imports only files that stand below it, and `places.py` of the package around it.
"""
