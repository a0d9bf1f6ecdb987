"""The operations of all ranks in one table of columns, whatever files they came from.

table.py        Table, and what its columns refer to: calls, groups, sources
checksums.py    Checksums: those of a table's rows, of which most jobs have none
rows.py         single rows of a table: found, and described as text
collectives.py  a number for each collective, and the rows of a collective on all ranks
clocks.py       the offsets between the ranks' clocks, estimated from collectives
table_store.py  TableStore: columns that grow, and numbers for values that repeat
ring_rows.py    RingTableBuilder: adds rings to a table
coalesced.py    merge_coalesced: the several entries of a coalesced collective of NCCL as one row
retirement.py   mark_failed: operations that torch's Gloo calls over, and that cannot have succeeded
builder.py      TableBuilder: adds rings and dumps to a table
archives.py     members of archives, in bounded memory
load.py         load: folders, files and archives into one table
tracks.py        slices that overlap in time, put onto tracks beside each other
"""
