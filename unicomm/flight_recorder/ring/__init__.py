"""The ring file, into which a process writes its records: where rings are stored, how one is read and copied.

files.py        opening files that others may have put there: regular, of bounded size, no links
folder.py       the folder for rings: chosen, private, bounded; processes by their number
reader.py       reads ring files into numpy arrays, without help from the process that wrote them
message_numbers.py  the numbers by which sends and receives belong together
whole_records.py  which records of a ring are whole, though the process may write while it is read
call_path.py    whose code the frames of a call path are, and which is the user's own line
record_text.py  the arguments and the call site of a ring's record as text
copies.py       copies of rings that keep the state of their process
endings.py      ending files: how the process of each rank ended
stacks.py       stacks of processes: asked for from outside, and read
newest_job.py   the files of the newest job in the folder for rings
places.py       places in programs, and which frame is the user's own
"""
