"""What the ranks of running jobs do now, from their rings alone.

snapshot.py  Snapshot: each rank's current operation, and the ranks it waits for
top.py       `unicomm trace top`: a snapshot on the terminal, drawn again and again
"""
