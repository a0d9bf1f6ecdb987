"""What the ranks of a rehearsal receive.

made_up.py    from a rank's own data, as if all ranks held equal data
real.py       what other ranks have sent, through files
recorded.py   what the ranks of a small run have received, for larger rehearsals
reads.py      lines of the program that read received data, or other data that is made up
notes.py      small values that other ranks have really sent
turns.py      with real values: one rank runs at a time, while the others wait for data

Each file imports only files that stand below it, and `places.py` of the package around it.
"""
